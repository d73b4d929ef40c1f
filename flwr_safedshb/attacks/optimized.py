"""Attacks that search for the strength that does the most damage to the server's rule.

All adversaries send B_t = mean + tau b, where mean is that of the honest vectors and b
is the attack's direction; tau maximises ||F(honest, B x f) - mean|| over a grid in
every step (Allouah et al., "On the Privacy-Robustness-Utility Trilemma in Distributed
Learning", ICML 2023, experiments).
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flwr_safedshb.aggregation.rule import FloatArray
from flwr_safedshb.attacks.base import Aggregate, Attack
from flwr_safedshb.attacks.candidates import (
    Candidates,
    check_finite,
    check_grid,
    find_worst,
    measure_damage,
)

# The paper does not give its grid. Eight values a decade: robust rules give way about
# in proportion to tau until they reject B, so the best of the grid falls some 25% short
# of the best tau at most. Below 0.1 there is little damage to do, and above 10 only
# rules that are not robust still listen.
TAUS = tuple(float(tau) for tau in np.geomspace(0.1, 10.0, 17))


@dataclass(frozen=True)
class SearchedAttack(Attack):
    """Send mean + tau * direction with the most damaging tau.

    Parameters
    ----------
    taus : increasing sequence of float
        The grid; of values that do the same damage the smallest is taken.
    """

    taus: Sequence[float] = TAUS

    def __post_init__(self) -> None:
        check_grid("taus", self.taus, least=1)

    @abstractmethod
    def direction(self, honest: FloatArray) -> FloatArray:
        """Return b, (d,), for honest vectors, (h, d)."""

    def craft_vectors(
        self, honest: FloatArray, f: int, rng: np.random.Generator, aggregate: Aggregate
    ) -> FloatArray:
        """Return the one vector, (d,), that all adversaries send."""
        check_finite(honest)
        direction = self.direction(honest)
        tau = most_damaging_tau(honest, direction, f, aggregate, self.taus)
        sent: FloatArray = honest.mean(axis=0) + tau * direction
        return sent


@dataclass(frozen=True)
class ALIE(SearchedAttack):
    """A Little Is Enough (Baruch et al., 2019): b = coordinate-wise standard deviation.

    With factor 1/h, as in the paper's covariances; any other factor rescales tau.
    """

    def direction(self, honest: FloatArray) -> FloatArray:
        """Return the standard deviation of each coordinate."""
        deviation: FloatArray = honest.std(axis=0)
        return deviation


@dataclass(frozen=True)
class FOE(SearchedAttack):
    """Fall of Empires (Xie et al., 2020): b = -mean."""

    def direction(self, honest: FloatArray) -> FloatArray:
        """Return the negated mean."""
        negated: FloatArray = -honest.mean(axis=0)
        return negated


def most_damaging_tau(
    honest: FloatArray,
    direction: FloatArray,
    f: int,
    aggregate: Aggregate,
    taus: Sequence[float] = TAUS,
) -> float:
    """Return the smallest tau that none beats by more than a billionth.

    The arguments are those of `damage_by_tau`.
    """
    damage = damage_by_tau(honest, direction, f, aggregate, taus)
    return float(taus[find_worst(honest, damage)])


def damage_by_tau(
    honest: FloatArray,
    direction: FloatArray,
    f: int,
    aggregate: Aggregate,
    taus: Sequence[float] = TAUS,
) -> FloatArray:
    """Return how far each tau, (g,), moves the aggregate from the honest mean.

    Parameters
    ----------
    honest : (h, d) array
    direction : (d,) array
        b.
    f : int
        Number of adversaries; all send mean + tau b.
    aggregate : Rule, or callable (vectors of shape (n, d), f) -> (d,) array
    taus : increasing sequence of float
    """
    h = len(honest)
    # The last row, b, stands for all adversaries.
    basis = np.vstack((honest - honest.mean(axis=0), direction))
    shares = np.zeros((len(taus), f, h + 1))
    shares[:, :, h] = np.asarray(taus, dtype=np.float64)[:, None]
    return measure_damage(honest, Candidates(basis, shares), f, aggregate)
