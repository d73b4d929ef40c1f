"""Where SMEA's search starts: an order, a good subset, and a bound on the best one."""

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.aggregation.gram import FloatArray, nearest_sums
from flwr_safedshb.aggregation.spectral import scatter_gram, scatter_lambda

Subset = NDArray[np.intp]

# Two subsets whose eigenvalues differ by less than this factor are a tie.
RESOLUTION = 1e-9
# Exchanges are ranked in the span of so many top eigenvectors, and so many are tried.
RITZ_VECTORS = 4
TRIED = 8


def outermost_first(distances: FloatArray, m: int) -> Subset:
    """Order the vectors, (..., n), by distances to their m nearest, largest first.

    A function of the vectors, not of their order, ties aside. What is obviously hostile
    comes first, where the search drops it at once.
    """
    return np.argsort(-nearest_sums(distances, m), axis=-1, kind="stable")


def shrink(distances: FloatArray, subset: Subset, m: int) -> Subset:
    """Drop the vector that weighs most in the top eigenvector until m are left."""
    while len(subset) > m:
        gram = scatter_gram(distances[np.ix_(subset, subset)])
        top = np.linalg.eigh(gram)[1][:, -1]
        subset = np.delete(subset, int(np.argmax(np.abs(top))))
    return subset


def descend(
    distances: FloatArray, subset: Subset, smallest: float
) -> tuple[Subset, float]:
    """Exchange one vector at a time while that lowers the top eigenvalue.

    Returns
    -------
    subset, eigenvalue
        Sorted, and the largest eigenvalue of its scatter.
    """
    improved = smallest > 0.0
    while improved:
        improved = False
        for candidate in _exchanges(distances, subset, smallest):
            value = scatter_lambda(distances, candidate)
            if value < smallest:
                subset, smallest, improved = candidate, value, True
                break
    return np.sort(subset), smallest


def _exchanges(distances: FloatArray, subset: Subset, smallest: float) -> list[Subset]:
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
        np.append(np.delete(subset, i), others[j])
        for i, j in zip(leaves, comes, strict=True)
    ]


def lower_bound(distances: FloatArray, m: int) -> float:
    """Return a lower bound on the top eigenvalue of the scatter of every m vectors."""
    # Each vector left out lowers the scatter by a matrix of rank one, so one eigenvalue
    # at most moves past the next (interlacing); less the round-off of the largest.
    spectrum = np.linalg.eigvalsh(scatter_gram(distances))
    round_off = 4 * len(distances) * np.finfo(float).eps * spectrum[-1]
    interlaced = float(spectrum[m - 1] - round_off)
    # The trace is a half of the mean squared distance times m, spread over at most
    # m - 1 eigenvalues.
    nearest = np.partition(nearest_sums(distances, m), m - 1)[:m]
    trace = float(nearest.sum()) / (2 * m)
    return max(0.0, interlaced, trace / max(1, m - 1))
