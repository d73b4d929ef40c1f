"""Samplers: how a batch is drawn (Alg. 1, line 4), and what one step reveals.

A sampler says everything about itself in one class: the name by which a `PrivacyPlan`
selects it, how it draws, and the pairs of distributions that bound what one step
reveals about one example. The accountants read nothing else. Every module of this
folder is imported, so a new sampler is a new file and needs no change anywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from dp_accounting import DpEvent, NeighboringRelation

    from flwr_safedshb.privacy.plan import PrivacyPlan
    from flwr_safedshb.privacy.randomness.noise import Randomness

Adjacency = Literal["replace-one", "add-remove"]
# (weight, mean) of every component; the weights add up to 1.
Mixture = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class MixturePair:
    """Two mixtures of Gaussians on a line: the release with an example and without it.

    Attributes
    ----------
    top, bottom : Mixture
        The privacy loss log(top(x) / bottom(x)) must not decrease in x.
    std : float
        Standard deviation of every component.
    """

    top: Mixture
    bottom: Mixture
    std: float


@dataclass(frozen=True)
class DominatingPair:
    """A bound of one step: its hockey-stick divergence is no larger at any epsilon.

    Attributes
    ----------
    above, below : MixturePair
        ``above`` bounds it for epsilon >= 0 and ``below`` for epsilon < 0; where one
        pair does both, the two are equal.
    """

    above: MixturePair
    below: MixturePair


@dataclass(frozen=True)
class GroupPair:
    """A bound of one fixed-size step about a group of examples (`group_loss`).

    Attributes
    ----------
    weights : tuple of float
        The probability that j of the group are drawn, from j = 0.
    std : float
        Standard deviation of the noise, in units of 2C/b.
    """

    weights: tuple[float, ...]
    std: float


class Sampler(ABC):
    """One way to draw batches, without state.

    Attributes
    ----------
    name : str
        In ``PrivacyPlan(sampling=...)``, in configs and in ledgers, where its meaning
        must never change.
    description : str
        In a privacy statement.
    adjacencies : tuple of Adjacency
        Units of privacy that it has an accountant for; the first is the usual one.
    canary_background : float
        Contribution of every other example to the datasets that are hardest to tell
        apart, in units of C, where the canary contributes 1.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    adjacencies: ClassVar[tuple[Adjacency, ...]] = ("replace-one",)
    canary_background: ClassVar[float]

    def check(self, plan: PrivacyPlan) -> None:
        """Raise a ValueError if this sampler cannot serve the plan."""
        if plan.adjacency not in self.adjacencies:
            known = " or ".join(repr(adjacency) for adjacency in self.adjacencies)
            raise ValueError(
                f"adjacency={plan.adjacency!r} has no accountant for "
                f"sampling={plan.sampling!r}; use adjacency={known}"
            )

    @abstractmethod
    def draw(self, plan: PrivacyPlan, randomness: Randomness) -> npt.NDArray[np.int64]:
        """Draw one batch, independently of all others.

        Returns
        -------
        ndarray of int64, shape (k,)
            Distinct indices in ``range(num_examples)``, in no particular order.
        """

    def padded_size(self, plan: PrivacyPlan) -> int:
        """Return the number of places of a batch, whatever is drawn.

        The same numbers round differently in a batch of another size, and under a
        hostile server's weights a gradient can be all rounding. So where the pairs say
        that an example is drawn or not, this must be the same number for both: then
        the others keep their places and their contributions.
        """
        return plan.batch_size

    @abstractmethod
    def dominating_pairs(self, plan: PrivacyPlan) -> tuple[DominatingPair, ...]:
        """Bound one step in the plan's adjacency.

        Returns
        -------
        tuple of DominatingPair
            Usually one. Two, if adding and removing an example are bounded separately:
            the steps of a run are composed within each, and the worse one counts.
        """

    def group_pairs(
        self, plan: PrivacyPlan, group: int
    ) -> tuple[DominatingPair | GroupPair, ...]:
        """Bound one step about `group` examples that are all exchanged, or left out."""
        raise ValueError(f"sampling={self.name!r} has no bound for groups of examples")

    @abstractmethod
    def dp_event(self, plan: PrivacyPlan) -> tuple[DpEvent, NeighboringRelation]:
        """Describe one step to dp_accounting's Renyi accountant, for comparisons."""


@cache
def load_samplers() -> Mapping[str, Sampler]:
    """Return all samplers, sorted by name."""
    for module in iter_modules(__path__, f"{__name__}."):
        import_module(module.name)
    samplers = {kind.name: kind() for kind in Sampler.__subclasses__()}
    return dict(sorted(samplers.items()))


def get_sampler(name: str) -> Sampler:
    """Return the sampler with a name, or raise a ValueError that lists the names."""
    samplers = load_samplers()
    if not isinstance(name, str) or name not in samplers:
        known = ", ".join(map(repr, samplers))
        raise ValueError(f"sampling={name!r} is unknown; use one of {known}")
    return samplers[name]
