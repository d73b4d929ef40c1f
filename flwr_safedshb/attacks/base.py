"""What every attack is: adversaries see what honest clients send, and then send."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.aggregation.rule import FloatArray

Floats = NDArray[np.floating]


class Aggregate(Protocol):
    """An aggregation rule as a function of vectors, (n, d), and f."""

    def __call__(self, vectors: Floats, f: int) -> Floats:
        """Return the aggregate, (d,)."""
        ...


@dataclass(frozen=True)
class Attack(ABC):
    """What f adversaries send in a step.

    Attributes
    ----------
    replaces_vectors : bool
        Whether the adversaries' vectors are made from the honest ones. In an attack on
        data the adversaries run the honest protocol, and their replies stand.
    """

    replaces_vectors: ClassVar[bool] = True

    @property
    def wants_gradient(self) -> bool:
        """Whether the adversaries make use of a gradient of their own."""
        return False

    def with_gradient(self, gradient: FloatArray) -> Self:
        """Return the attack of adversaries who know a gradient, if that is of use.

        Parameters
        ----------
        gradient : (d,) array
            Of the loss on the adversaries' own examples, at the model of the step.
        """
        return self

    @property
    def wants_goal(self) -> bool:
        """Whether the adversaries need to be told where the model shall go."""
        return False

    def with_goal(self, goal: FloatArray) -> Self:
        """Return the attack of adversaries who know a goal, if that is of use.

        Parameters
        ----------
        goal : (d,) array
            Where the model shall go in this run, as seen from the first model.
        """
        return self

    def __call__(
        self, honest: Floats, f: int, rng: np.random.Generator, aggregate: Aggregate
    ) -> Floats:
        """Return what f adversaries send who have seen the honest vectors.

        Parameters
        ----------
        honest : (h, d) array
            What the honest clients send in this step.
        f : int
            How many vectors to make.
        rng : Generator
            The only source of randomness.
        aggregate : Rule, or callable (vectors of shape (n, d), f) -> (d,) array
            The rule that the server uses.

        Returns
        -------
        (f, d) array of the dtype of `honest`
        """
        check_honest(honest, f)
        if f == 0:
            return np.empty((0, honest.shape[1]), honest.dtype)
        exact = honest.astype(np.float64, copy=False)
        crafted = self.craft_vectors(exact, f, rng, aggregate)
        with np.errstate(over="ignore"):
            return np.broadcast_to(crafted, (f, honest.shape[1])).astype(honest.dtype)

    @abstractmethod
    def craft_vectors(
        self, honest: FloatArray, f: int, rng: np.random.Generator, aggregate: Aggregate
    ) -> FloatArray:
        """Return f > 0 vectors, (f, d), or (d,) if the adversaries send the same."""


def check_honest(honest: Floats, f: int) -> None:
    """Refuse what no attack can start from."""
    if honest.ndim != 2 or 0 in honest.shape:
        raise ValueError(
            f"honest has shape {honest.shape}; give an (h, d) array, one row for each "
            "honest client, h and d at least 1"
        )
    if not np.issubdtype(honest.dtype, np.floating):
        raise ValueError(f"honest has dtype {honest.dtype}; give floating-point values")
    if f < 0:
        raise ValueError(f"f={f} must be at least 0; it counts adversarial clients")
