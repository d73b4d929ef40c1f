"""Attacks that search for the strength that does the most harm to the server's rule.

All adversaries send B_t = mean + tau b, where mean is that of the honest vectors and b
is the attack's direction; tau maximises ||F(honest, B x f) - mean|| over a grid in
every step (Allouah et al., "On the Privacy-Robustness-Utility Trilemma in Distributed
Learning", ICML 2023, experiments).

For a rule F that needs inner products only, the whole grid follows from one Gram
matrix: about the honest mean, the vectors are y_1..y_h and f times tau b, so their
inner products are those of y_1..y_h, b times 1, tau or tau^2. No vector is aggregated.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from flwr_safedshb.aggregation import NNM, GramRule
from flwr_safedshb.aggregation.gram import FloatArray
from flwr_safedshb.attacks.base import Aggregate, Attack

# The paper does not give its grid. Eight values a decade: robust rules give way about
# in proportion to tau until they reject B, so the best of the grid falls some 25% short
# of the best tau at most. Below 0.1 there is little harm to do, and above 10 only rules
# that are not robust still listen.
TAUS = tuple(float(tau) for tau in np.geomspace(0.1, 10.0, 17))

# Distances that differ by less than this fraction, or by round-off, are a tie.
RESOLUTION = 1e-9
ROUND_OFF = 64 * float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class SearchedAttack(Attack):
    """Send mean + tau * direction with the most harmful tau.

    Parameters
    ----------
    taus : increasing sequence of float
        The grid; of values that do the same harm the smallest is taken.
    """

    taus: Sequence[float] = TAUS

    def __post_init__(self) -> None:
        grid = np.asarray(self.taus, dtype=np.float64)
        if grid.ndim != 1 or not len(grid) or not np.isfinite(grid).all():
            raise ValueError(f"taus={self.taus} must be one or more finite numbers")
        if (np.diff(grid) <= 0.0).any():
            raise ValueError(
                f"taus={self.taus} must increase; sort it, each value once"
            )

    @abstractmethod
    def direction(self, honest: FloatArray) -> FloatArray:
        """Return b, (d,), for honest vectors, (h, d)."""

    def vectors(
        self,
        honest: FloatArray,
        f: int,
        rng: np.random.Generator,
        aggregate: Aggregate,
    ) -> FloatArray:
        """Return the one vector, (d,), that all adversaries send."""
        if not np.isfinite(honest).all():
            raise ValueError(
                "honest holds NaN or infinity, against which no tau can be weighed; "
                "leave those clients out"
            )
        direction = self.direction(honest)
        tau = most_harmful_tau(honest, direction, f, aggregate, self.taus)
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


def most_harmful_tau(
    honest: FloatArray,
    direction: FloatArray,
    f: int,
    aggregate: Aggregate,
    taus: Sequence[float] = TAUS,
) -> float:
    """Return the tau that moves the aggregate farthest from the honest mean.

    Parameters
    ----------
    honest : (h, d) array
    direction : (d,) array
        b.
    f : int
        Number of adversaries; all send mean + tau b.
    aggregate : Rule, or callable (vectors of shape (n, d), f) -> (d,) array
    taus : increasing sequence of float

    Returns
    -------
    float
        Of `taus`, the smallest that nothing beats by more than `RESOLUTION`.
    """
    distances = harms(honest, direction, f, aggregate, taus)
    largest = distances.max()
    if np.isfinite(largest):
        # What a sum of the vectors cannot resolve is no harm.
        norm = np.sqrt(np.square(honest).sum(axis=1).max())
        largest -= RESOLUTION * largest + ROUND_OFF * norm
    return float(taus[int(np.argmax(distances >= largest))])


def harms(
    honest: FloatArray,
    direction: FloatArray,
    f: int,
    aggregate: Aggregate,
    taus: Sequence[float] = TAUS,
) -> FloatArray:
    """Return how far each tau, (g,), moves the aggregate from the honest mean.

    The arguments are those of `most_harmful_tau`.
    """
    grid = np.asarray(taus, dtype=np.float64)
    mean = honest.mean(axis=0)
    if _has_weights(aggregate):
        return _weighed_harms(honest - mean, direction, f, aggregate, grid)
    return _plain_harms(honest, mean, direction, f, aggregate, grid)


def _has_weights(aggregate: Aggregate) -> TypeGuard[GramRule]:
    """Say if a rule can answer with weights from a Gram matrix."""
    if isinstance(aggregate, NNM):
        return _has_weights(aggregate.rule)
    return isinstance(aggregate, GramRule)


def _weighed_harms(
    centred: FloatArray, direction: FloatArray, f: int, rule: GramRule, taus: FloatArray
) -> FloatArray:
    """Return harms, (g,), by the weights of vectors that are never formed.

    Parameters
    ----------
    centred : (h, d) array
        Honest vectors about their mean: a large common offset must not cancel.
    """
    h = len(centred)
    rows = np.vstack((centred, direction))
    # The last row, b, stands for all adversaries.
    sender = np.append(np.arange(h), np.full(f, h))
    products = (rows @ rows.T)[np.ix_(sender, sender)]
    scales = np.where(sender == h, taus[:, None], 1.0)
    grams = products * scales[:, :, None] * scales[:, None, :]
    weights = rule.weigh_many(grams, f)
    # The centred honest vectors sum to zero, so a share that all of them have drops
    # out; taken away first, it leaves exactly zero where the rule returns their mean.
    weights[:, :h] -= weights[:, :1].copy()
    squares = np.einsum("gi,gij,gj->g", weights, grams, weights)
    distances: FloatArray = np.sqrt(np.maximum(squares, 0.0))
    return distances


def _plain_harms(
    honest: FloatArray,
    mean: FloatArray,
    direction: FloatArray,
    f: int,
    aggregate: Aggregate,
    taus: FloatArray,
) -> FloatArray:
    """Return harms, (g,), by aggregation."""
    n, d = len(honest) + f, honest.shape[1]
    distances = np.empty(len(taus))
    for k, tau in enumerate(taus):
        # Anew for every tau: a callable may keep or overwrite what it is given.
        vectors = np.empty((n, d))
        vectors[: len(honest)] = honest
        vectors[len(honest) :] = mean + tau * direction
        distances[k] = np.linalg.norm(aggregate(vectors, f) - mean)
    # An aggregate that is no vector any more is as far away as can be.
    return np.where(np.isnan(distances), np.inf, distances)
