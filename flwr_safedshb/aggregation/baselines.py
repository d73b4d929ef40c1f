"""Rules of other papers that need inner products only, to compare with."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.aggregation.gram import (
    CANCELLATION,
    GramRule,
    check_gram,
    check_grams,
    scale_by_power,
    weighted_sum,
)
from flwr_safedshb.aggregation.rule import (
    Clients,
    FloatArray,
    Floats,
    Weighing,
    check_positive,
)
from flwr_safedshb.aggregation.scatter import (
    nearest_sums,
    scatter_lambda,
    squared_distances,
    weighted_lambda,
)
from flwr_safedshb.theory import kappa_geometric_median, kappa_krum

MEDIAN_STEPS = 3_000
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
        return subset_mean(gram, krum_order(gram, f)[:1])

    def kappa(self, n: int, f: int) -> float:
        """Return 6 (1 + f/(n-2f))."""
        return kappa_krum(n, f)


@dataclass(frozen=True)
class MultiKrum(GramRule):
    """The mean of the n - f vectors with the best scores of `Krum`."""

    def weigh(self, gram: FloatArray, f: int) -> Weighing:
        """Return equal weights on n - f vectors."""
        gram = check_gram(gram, f)
        return subset_mean(gram, krum_order(gram, f)[: len(gram) - f])


@dataclass(frozen=True)
class GeometricMedian(GramRule):
    """The point with the smallest sum of distances.

    A vector if one is the median, else Weiszfeld's and Newton's steps on weights until
    they stand still.
    """

    def weigh(self, gram: FloatArray, f: int) -> Weighing:
        """Return the weights of the median as a convex combination."""
        gram = check_gram(gram, f)
        (weights,) = _geometric_median_weights(gram[None])
        value = weighted_lambda(gram, weights)
        return Weighing(weights, subset=None, lambda_max=value)

    def weigh_many(self, grams: FloatArray, f: int) -> FloatArray:
        """Return the weights, (g, n), for each Gram matrix, computed side by side."""
        return _geometric_median_weights(check_grams(grams, f))

    def kappa(self, n: int, f: int) -> float:
        """Return 4 (1 + f/(n-2f))^2."""
        return kappa_geometric_median(n, f)


@dataclass(frozen=True)
class CentredClipping(GramRule):
    """Let every vector pull the aggregate no farther than a radius.

    Karimireddy, He and Jaggi, "Learning from History for Byzantine Robust
    Optimization", ICML 2021. Theirs starts from the last aggregate; this one has no
    memory and starts from the vector that has its n - f nearest around it most closely.

    Parameters
    ----------
    radius : float
        tau of the paper.
    iterations : int
    """

    radius: float = 1.0
    iterations: int = 10

    def __post_init__(self) -> None:
        check_positive("radius", self.radius)
        if self.iterations < 1:
            raise ValueError(f"iterations={self.iterations} must be at least 1")

    def change_unit(self, exponent: int) -> Self:
        """Return the rule for vectors in another unit: a radius stays above 0."""
        radius = float(scale_by_power(self.radius, exponent))
        return replace(self, radius=max(radius, np.finfo(float).tiny))

    def weigh(self, gram: FloatArray, f: int) -> Weighing:
        """Return the weights after all iterations."""
        gram = check_gram(gram, f)
        n, distances = len(gram), squared_distances(gram)
        weights = np.zeros(n)
        weights[np.argmin(nearest_sums(distances, n - f))] = 1.0
        for _ in range(self.iterations):
            # |x_i - v|^2 for v = sum_j w_j x_j. By inner products: among distances, a
            # vector of norm 1e30 leaves no digit of the others.
            products = gram @ weights
            squares = np.diagonal(gram) - 2.0 * products + weights @ products
            far = np.sqrt(np.maximum(squares, 0.0))
            near = far <= self.radius
            pulls = np.where(near, 1.0, self.radius / np.where(near, 1.0, far)) / n
            weights = weights * (1.0 - pulls.sum()) + pulls
        return Weighing(weights, None, weighted_lambda(gram, weights))


def krum_order(gram: FloatArray, f: int) -> NDArray[np.intp]:
    """Return the vectors sorted by their squared distances to the n - f nearest."""
    scores = nearest_sums(squared_distances(gram), len(gram) - f)
    return np.argsort(scores, kind="stable")


def subset_mean(gram: FloatArray, subset: NDArray[np.intp]) -> Weighing:
    """Return the plain mean of a subset."""
    subset = np.sort(subset)
    value = scatter_lambda(squared_distances(gram), subset) / len(subset)
    weights = np.bincount(subset, minlength=len(gram)) / len(subset)
    return Weighing(weights, subset, value)


def _geometric_median_weights(grams: FloatArray) -> FloatArray:
    """Return the weights, (g, n), of the geometric medians for Gram matrices.

    By inner products and not by distances: among those, a vector of norm 1e30 leaves no
    digit of the others.
    """
    g, n = grams.shape[:2]
    grams = _centre_grams(grams)
    distances = squared_distances(grams)
    norms = np.diagonal(grams, axis1=1, axis2=2)
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
    weights = np.empty((g, n))
    one = excess.min(axis=1) <= 0.0
    weights[one] = np.eye(n)[np.argmin(excess[one], axis=1)]
    weights[~one] = _iterate_medians(grams[~one])
    return weights


def _centre_grams(grams: FloatArray) -> FloatArray:
    """Return Gram matrices, (g, n, n), about a vector where there is a common offset.

    The digits that the offset took are lost, but then no step loses others, so that the
    steps converge.
    """
    sums = squared_distances(grams).sum(axis=2)
    centre = np.argmin(sums, axis=1)[:, None]
    near = np.take_along_axis(sums, centre, axis=1)[:, :, None] / grams.shape[1]
    rows = np.take_along_axis(grams, centre[:, :, None], axis=1)
    squares = np.take_along_axis(rows, centre[:, :, None], axis=2)
    moved = grams - rows - rows.swapaxes(1, 2) + squares
    centred: FloatArray = np.where(squares > CANCELLATION * near, moved, grams)
    return centred


def _iterate_medians(grams: FloatArray) -> FloatArray:
    """Return the weights, (g, n), of medians that are not one of the vectors.

    Weiszfeld's step w -> T(w), whose only fixed point is the median, always converges,
    but slowly. Newton's step for log T(w) = log w is fast near the end and may lead
    astray, so it counts only if the gap falls below nine tenths of the smallest so far.
    """
    g, n = grams.shape[:2]
    found = np.empty((g, n))
    open_, weights = np.arange(g), np.full((g, n), 1.0 / n)
    plain, least, tried = weights, np.full(g, np.inf), np.zeros(g, dtype=bool)
    for _ in range(MEDIAN_STEPS):
        if not len(open_):
            break
        moved, ahead, gaps = _median_steps(grams, weights)
        found[open_] = moved
        # The weight of a vector far away is tiny, and counts as much as any other.
        still = np.minimum(MEDIAN_TOLERANCE, RELATIVE_TOLERANCE * moved)
        on = (np.abs(moved - weights) > still).any(axis=1)
        astray = tried & ~(gaps <= 0.9 * least)
        plain = np.where(astray[:, None], plain, moved)
        least = np.where(astray, least, np.minimum(least, gaps))
        tried = ~astray & np.isfinite(ahead).all(axis=1)
        weights = np.where(tried[:, None], ahead, plain)
        open_, grams, weights, plain = open_[on], grams[on], weights[on], plain[on]
        least, tried = least[on], tried[on]
    return found


def _median_steps(
    grams: FloatArray, weights: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return Weiszfeld's step and Newton's, (g, n) each, and the gaps, (g,).

    With y the weighted mean and r_i = |x_i - y|^2, T(w)_i is 1 / sqrt(r_i) over the sum
    of these, and d log r_i / d w_k = 2 (y - x_i) (x_k - y) / r_i.
    """
    products = (grams @ weights[:, :, None])[:, :, 0]
    own = (weights * products).sum(axis=1, keepdims=True)
    squares = np.diagonal(grams, axis1=1, axis2=2) - 2.0 * products + own
    # A step from very near a vector that is not the median leads away from it.
    typical = np.median(squares, axis=1, keepdims=True)
    typical = np.maximum(typical, np.finfo(float).tiny)
    squares = np.maximum(squares, MEDIAN_TOLERANCE**2 * typical)
    moved = 1.0 / np.sqrt(squares)
    moved /= moved.sum(axis=1, keepdims=True)
    with np.errstate(all="ignore"):
        gaps = np.log(moved) - np.log(weights)
        slopes = products[:, :, None] + (products - own)[:, None, :] - grams
        slopes *= weights[:, None, :] / squares[:, :, None]
        slopes -= moved[:, None, :] @ slopes
        slopes += np.eye(weights.shape[1])
        ahead = weights * np.exp(_solve_systems(slopes, gaps))
        ahead /= ahead.sum(axis=1, keepdims=True)
    return moved, ahead, np.abs(gaps).max(axis=1)


def _solve_systems(matrices: FloatArray, right: FloatArray) -> FloatArray:
    """Return the solutions of g systems, (g, n), by elimination; NaN where it fails."""
    n = right.shape[1]
    rows = np.concatenate((matrices, right[:, :, None]), axis=2)
    for k in range(n):
        rows[:, k] /= rows[:, k, k, None]
        factors = rows[:, :, k].copy()
        factors[:, k] = 0.0
        rows[:, :, k:] -= factors[:, :, None] * rows[:, None, k, k:]
    return rows[:, :, n]
