"""What a sampler is: how batches are drawn, and what one step of them gives away.

A sampler says everything about itself in one file of this folder: the word by which a
`PrivacyPlan` names it, how it draws, how dp_accounting calls it, and the pairs of
distributions that bound what one step tells about one example. The accountants read
nothing else, so a new sampler needs no change anywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from dp_accounting import DpEvent, NeighboringRelation

    from flwr_safedshb.privacy.plan import PrivacyPlan
    from flwr_safedshb.privacy.randomness.noise import Randomness

Adjacency = Literal["replace-one", "add-remove"]
# Weights, which add up to 1, and means.
Mixture = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Pair:
    """What is released with an example, and without it, along one line.

    Attributes
    ----------
    top, bottom : Mixture
        Of Gaussians. The loss log(top(x) / bottom(x)) must not decrease in x.
    std : float
        Deviation of all of them.
    """

    top: Mixture
    bottom: Mixture
    std: float


@dataclass(frozen=True)
class Profile:
    """Bound of what one step tells: for every epsilon, P(E) - e^epsilon Q(E) at most.

    A mechanism is dominated by ``above`` where epsilon is positive and by ``below``
    where it is negative; where one pair does both, the two are equal.

    Attributes
    ----------
    above, below : Pair
    """

    above: Pair
    below: Pair


class Sampler(ABC):
    """One way to draw batches; it has no state, and one of each kind is enough.

    Attributes
    ----------
    word : str
        Its name in ``PrivacyPlan(sampling=...)``, in configs and in ledgers, where it
        must mean the same for ever.
    description : str
        Its name in a privacy statement.
    adjacencies : tuple of Adjacency
        The units of privacy that it has an accountant for; the first is the usual one.
    others : float
        What every other example contributes in the pair of datasets that is hardest to
        hide, in units of the clip (C), where the example itself contributes 1.
    """

    word: ClassVar[str]
    description: ClassVar[str]
    adjacencies: ClassVar[tuple[Adjacency, ...]] = ("replace-one",)
    others: ClassVar[float]

    def check(self, plan: PrivacyPlan) -> None:
        """Raise a ValueError if the plan's numbers are not for this sampler."""
        if plan.adjacency not in self.adjacencies:
            words = " or ".join(repr(word) for word in self.adjacencies)
            raise ValueError(
                f"adjacency={plan.adjacency!r} has no accountant for "
                f"sampling={plan.sampling!r}; use adjacency={words}"
            )

    @abstractmethod
    def draw(self, plan: PrivacyPlan, randomness: Randomness) -> npt.NDArray[np.int64]:
        """Draw one batch, independently of all others (Alg. 1, line 4).

        Returns
        -------
        ndarray of int64, shape (k,)
            Distinct indices in ``range(num_examples)``, in no particular order.
        """

    def places(self, plan: PrivacyPlan) -> int:
        """Return how many places a batch has, whatever is drawn.

        The same numbers round otherwise in a batch of another size, and under a hostile
        server's weights a gradient can be all rounding. So where pairs say that an
        example is drawn or not, this must be the same number for both: then the others
        keep their places, and give what they gave.
        """
        return plan.batch_size

    @abstractmethod
    def profiles(self, plan: PrivacyPlan) -> tuple[Profile, ...]:
        """Bound one step in the plan's adjacency.

        Returns
        -------
        tuple of Profile
            Usually one. Two, if adding and removing an example are bounded apart; then
            the steps of a run are composed within each, and the worse one counts.
        """

    @abstractmethod
    def event(self, plan: PrivacyPlan) -> tuple[DpEvent, NeighboringRelation]:
        """Describe one step to dp_accounting's Renyi accountant, for comparisons."""
