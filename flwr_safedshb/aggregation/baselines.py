"""What users compare with: rules of other papers that need inner products only."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.aggregation.gram import (
    GramRule,
    check_gram,
    nearest_sums,
    scatter_lambda,
    squared_distances,
    weighted_lambda,
    weighted_sum,
)
from flwr_safedshb.aggregation.rule import Clients, FloatArray, Floats, Weighing
from flwr_safedshb.theory import kappa_geometric_median, kappa_krum

MEDIAN_STEPS = 10_000
MEDIAN_TOLERANCE = 1e-12
RELATIVE_TOLERANCE = 1e-8


@dataclass(frozen=True)
class Average(GramRule):
    """The plain mean: not robust, the benchmark without adversaries."""

    def aggregate(self, clients: Clients, f: int) -> tuple[list[Floats], None]:
        """Average without a Gram matrix."""
        return weighted_sum(clients, np.full(len(clients), 1.0 / len(clients))), None

    def weigh(self, gram: FloatArray, f: int) -> Weighing:
        """Return equal weights."""
        return subset_mean(check_gram(gram, f), np.arange(len(gram)))


@dataclass(frozen=True)
class Krum(GramRule):
    """The vector nearest to its n - f nearest, itself among them.

    As analysed in "Fixing by Mixing"; Blanchard et al. (2017) leave the farthest of
    these out, for which the constant is not proved.
    """

    def weigh(self, gram: FloatArray, f: int) -> Weighing:
        """Return all weight on one vector."""
        gram = check_gram(gram, f)
        return subset_mean(gram, _krum_order(gram, f)[:1])

    def kappa(self, n: int, f: int) -> float:
        """Return 6 (1 + f/(n-2f))."""
        return kappa_krum(n, f)


@dataclass(frozen=True)
class MultiKrum(GramRule):
    """The mean of the n - f vectors with the best scores of `Krum`."""

    def weigh(self, gram: FloatArray, f: int) -> Weighing:
        """Return equal weights on n - f vectors."""
        gram = check_gram(gram, f)
        return subset_mean(gram, _krum_order(gram, f)[: len(gram) - f])


@dataclass(frozen=True)
class GeometricMedian(GramRule):
    """The point with the smallest sum of distances.

    A vector if one is the median, else Weiszfeld's iteration on weights until they
    stand still.
    """

    def weigh(self, gram: FloatArray, f: int) -> Weighing:
        """Return the weights of the median as a convex combination."""
        gram = check_gram(gram, f)
        (weights,) = _geometric_medians(gram[None])
        value = weighted_lambda(squared_distances(gram), weights)
        return Weighing(weights, subset=None, lambda_max=value)

    def weigh_many(self, grams: FloatArray, f: int) -> FloatArray:
        """Return the weights for each Gram matrix; they are found side by side."""
        return _geometric_medians(np.array([check_gram(gram, f) for gram in grams]))

    def kappa(self, n: int, f: int) -> float:
        """Return 4 (1 + f/(n-2f))^2."""
        return kappa_geometric_median(n, f)


def _krum_order(gram: FloatArray, f: int) -> NDArray[np.intp]:
    """Order the vectors by their squared distances to the n - f nearest."""
    scores = nearest_sums(squared_distances(gram), len(gram) - f)
    return np.argsort(scores, kind="stable")


def subset_mean(gram: FloatArray, subset: NDArray[np.intp]) -> Weighing:
    """Return the plain mean of a subset."""
    subset = np.sort(subset)
    value = scatter_lambda(squared_distances(gram), subset) / len(subset)
    weights = np.bincount(subset, minlength=len(gram)) / len(subset)
    return Weighing(weights, subset, value)


def _geometric_medians(grams: FloatArray) -> FloatArray:
    """Return weights, (g, n), of the geometric medians, from inner products, (g, n, n).

    By inner products and not by distances: among those, a vector of norm 1e30 leaves no
    digit of the others.
    """
    g, n = grams.shape[:2]
    norms = np.diagonal(grams, axis1=1, axis2=2)
    distances = squared_distances(grams)
    # x_i is the median exactly if the unit vectors towards the others sum to no more
    # than the number of vectors at x_i.
    apart = distances > 0.0
    pulls = np.where(apart, 1.0 / np.sqrt(np.where(apart, distances, 1.0)), 0.0)
    totals = pulls.sum(axis=2)
    along = pulls @ grams
    squares = (along * pulls).sum(axis=2)
    squares -= 2.0 * totals * np.diagonal(along, axis1=1, axis2=2)
    squares += totals**2 * norms
    excess = np.sqrt(np.maximum(squares, 0.0)) - (~apart).sum(axis=2)
    weights = np.full((g, n), 1.0 / n)
    one = excess.min(axis=1) <= 0.0
    weights[one] = np.eye(n)[np.argmin(excess[one], axis=1)]
    open_ = np.flatnonzero(~one)
    for _ in range(MEDIAN_STEPS):
        if not len(open_):
            break
        before = weights[open_]
        products = (grams[open_] @ before[:, :, None])[:, :, 0]
        squares = norms[open_] - 2.0 * products
        squares += (before * products).sum(axis=1, keepdims=True)
        # A step from very near a vector that is not the median leads away from it.
        typical = np.median(squares, axis=1, keepdims=True)
        typical = np.maximum(typical, np.finfo(float).tiny)
        moved = 1.0 / np.sqrt(np.maximum(squares, MEDIAN_TOLERANCE**2 * typical))
        moved /= moved.sum(axis=1, keepdims=True)
        weights[open_] = moved
        # The weight of a vector far away is tiny, and counts as much as any other.
        still = np.minimum(MEDIAN_TOLERANCE, RELATIVE_TOLERANCE * moved)
        open_ = open_[(np.abs(moved - before) > still).any(axis=1)]
    return weights
