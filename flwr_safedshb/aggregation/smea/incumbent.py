"""Good subsets that SMEA's search starts from, and that it makes of its solutions."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.aggregation.rule import FloatArray
from flwr_safedshb.aggregation.scatter import (
    Subset,
    nearest_sums,
    scatter_gram,
    scatter_lambda,
)
from flwr_safedshb.aggregation.smea.budget import DECOMPOSITION, WorkBudget

# Products with the scatter that its top direction is taken from; the next one starts
# from it.
PRODUCTS = 8
# Exchanges are ranked in the span of so many top eigenvectors, and so many are tried.
RITZ_VECTORS = 4
TRIED = 8
# Up to so many vectors a whole decomposition is faster than the products one by one.
DENSE = 48
# Of so many vectors on each side, exchanges are ranked.
SIDE = 64


@dataclass
class Incumbent:
    """The best subset so far and the top eigenvalue of its scatter."""

    distances: FloatArray = field(repr=False)
    subset: Subset
    value: float

    def try_superset(self, superset: Subset, target: float, budget: WorkBudget) -> bool:
        """Replace the subset by the best of `superset` if that is below `target`."""
        subset = drop_outliers(self.distances, superset, len(self.subset), budget)
        value = scatter_lambda(self.distances, subset)
        budget.spend_passes(DECOMPOSITION // 2, len(subset))
        if not value < target:
            return False
        self.subset, self.value = exchange_vectors(
            self.distances, subset, value, budget
        )
        return True


def find_incumbent(distances: FloatArray, m: int, budget: WorkBudget) -> Incumbent:
    """Return the better of two subsets, improved while the budget allows.

    One is what `drop_outliers` leaves, the other the m vectors about the one that has
    them nearest: of zero scatter, if there are m equal vectors.
    """
    nearest = int(np.argmin(nearest_sums(distances, m)))
    ball = np.argsort(distances[nearest], kind="stable")[:m]
    left = drop_outliers(distances, np.arange(len(distances)), m, budget)
    values = [scatter_lambda(distances, subset) for subset in (left, ball)]
    budget.spend_passes(DECOMPOSITION, m)
    value, subset = min(zip(values, (0, 1), strict=True))
    chosen = (left, ball)[subset]
    return Incumbent(distances, *exchange_vectors(distances, chosen, value, budget))


def drop_outliers(
    distances: FloatArray, subset: Subset, m: int, budget: WorkBudget
) -> Subset:
    """Drop the vector that sticks out most along the top direction until m are left."""
    block = distances[np.ix_(subset, subset)]
    kept = np.ones(len(subset), dtype=bool)
    along = np.cos(1.0 + np.arange(len(subset)))
    for _ in range(len(subset) - m):
        along = _top_direction(block, kept, along)
        budget.spend_passes(PRODUCTS, len(subset))
        kept[np.argmax(np.where(kept, np.abs(along), -1.0))] = False
    return subset[kept]


def _top_direction(
    block: FloatArray, kept: NDArray[np.bool_], start: FloatArray
) -> FloatArray:
    """Return where vectors lie along the top direction of those kept, (c,), roughly.

    Many vectors take a few steps of Lanczos' iteration from where they lay before.

    Parameters
    ----------
    block : (c, c) array
        Squared distances.
    kept : (c,) boolean array
    start : (c,) array
    """
    if len(start) <= DENSE:
        scatter = scatter_gram(block[np.ix_(kept, kept)])
        exact = np.zeros(len(start))
        exact[kept] = np.linalg.eigh(scatter)[1][:, -1]
        return exact

    def subtract_mean(values: FloatArray) -> FloatArray:
        return np.where(kept, values - values[kept].mean(), 0.0)

    basis = np.empty((0, len(start)))
    images = np.empty((0, len(start)))
    vector = subtract_mean(start)
    for _ in range(PRODUCTS):
        scale = np.abs(vector).max()
        if scale == 0.0:
            break
        vector = vector / scale
        size = np.linalg.norm(vector)
        for _ in range(2):  # twice is enough
            vector = vector - basis.T @ (basis @ vector)
        if not np.linalg.norm(vector) > 1e-10 * size:
            break
        vector = vector / np.linalg.norm(vector)
        image = subtract_mean(-0.5 * (block @ vector))
        basis, images = np.vstack((basis, vector)), np.vstack((images, image))
        vector = image
    if not len(basis):
        return start  # what is left has no spread
    small = basis @ images.T
    top: FloatArray = np.linalg.eigh(small + small.T)[1][:, -1] @ basis
    return top


def exchange_vectors(
    distances: FloatArray, subset: Subset, smallest: float, budget: WorkBudget
) -> tuple[Subset, float]:
    """Exchange one vector at a time while that lowers the top eigenvalue.

    Returns
    -------
    subset, eigenvalue
        Sorted, and the largest eigenvalue of its scatter.
    """
    improved = smallest > 0.0
    while improved and budget.remaining_work():
        improved = False
        budget.spend_passes(DECOMPOSITION, len(subset))
        for candidate in _rank_exchanges(distances, subset, smallest):
            value = scatter_lambda(distances, candidate)
            budget.spend_passes(DECOMPOSITION // 2, len(subset))
            if value < smallest:
                subset, smallest, improved = candidate, value, True
                break
    return np.sort(subset), smallest


def _rank_exchanges(
    distances: FloatArray, subset: Subset, smallest: float
) -> list[Subset]:
    """Return the exchanges that may lower the top eigenvalue, the best first.

    The scatter of the exchanged set, compressed to the top eigenvectors of the present
    one, bounds its eigenvalue from below.
    """
    others = np.setdiff1d(np.arange(len(distances)), subset)
    m = len(subset)
    block = distances[np.ix_(subset, subset)]
    values, vectors = np.linalg.eigh(scatter_gram(block))
    values, vectors = values[-RITZ_VECTORS:], vectors[:, -RITZ_VECTORS:]
    kept = values > 0.0
    values, vectors = values[kept], vectors[:, kept]
    if not len(values) or not len(others):
        return []
    # Coordinates about the mean of the subset, along its top eigenvectors u = Y^T w/s:
    # members have w s, and others <x - mean, Y^T w>/s by distances.
    members = vectors * np.sqrt(values)
    outer = distances[np.ix_(others, subset)]
    inner = -0.5 * (outer - outer.mean(axis=1, keepdims=True) - block.mean(axis=0))
    joined = inner @ vectors / np.sqrt(values)
    # The members farthest out along them may leave, the others nearest may come.
    leaving = _smallest_places(-np.square(members).sum(axis=1))
    coming = _smallest_places(np.square(joined).sum(axis=1))
    members, joined = members[leaving], joined[coming]
    # Scatter after x leaves and z comes: S - x x^T + z z^T - (z - x)(z - x)^T/m.
    leave = members[:, None, :, None] * members[:, None, None, :]
    come = joined[None, :, :, None] * joined[None, :, None, :]
    shift = joined[None, :, :] - members[:, None, :]
    moved = shift[..., :, None] * shift[..., None, :] / m
    compressed = np.diag(values) - leave + come - moved
    bounds = np.linalg.eigvalsh(compressed)[..., -1]
    order = np.argsort(bounds, axis=None, kind="stable")[:TRIED]
    promising = [k for k in order if bounds.flat[k] < smallest]
    leaves, comes = np.unravel_index(promising, bounds.shape) if promising else ((), ())
    return [
        np.append(np.delete(subset, leaving[i]), others[coming[j]])
        for i, j in zip(leaves, comes, strict=True)
    ]


def _smallest_places(values: FloatArray) -> Subset:
    """Return where the `SIDE` smallest values are, in their order of place."""
    return np.sort(np.argsort(values, kind="stable")[:SIDE])
