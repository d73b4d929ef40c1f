"""Distances between vectors, and eigenvalues of their scatter, from inner products."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.aggregation.rule import FloatArray

Subset = NDArray[np.intp]

# Two subsets whose eigenvalues differ by less than this factor are a tie.
RESOLUTION = 1e-9
# Up to so many points they are centred by one product.
_FEW = 8


def squared_distances(gram: FloatArray) -> FloatArray:
    """Return squared distances between the vectors of Gram matrices, (..., n, n).

    A distance below the round-off of the Gram matrix is returned as zero, so that equal
    vectors are seen to be equal.
    """
    squares = np.diagonal(gram, axis1=-2, axis2=-1)
    sums = squares[..., :, None] + squares[..., None, :]
    distances = sums - (gram + np.swapaxes(gram, -2, -1))
    distances[distances <= 8 * np.finfo(float).eps * sums] = 0.0
    distances[..., np.arange(gram.shape[-1]), np.arange(gram.shape[-1])] = 0.0
    return distances


def nearest_sums(distances: FloatArray, m: int) -> FloatArray:
    """Return for each vector the sum of its m smallest squared distances, (..., n).

    Its distance to itself, zero, is one of them.
    """
    sums: FloatArray = np.partition(distances, m - 1, axis=-1)[..., :m].sum(axis=-1)
    return sums


def sort_by_isolation(gram: FloatArray, m: int) -> tuple[FloatArray, NDArray[np.intp]]:
    """Sort vectors by the distance to their m nearest, the most isolated first.

    So an obviously hostile vector comes first, and the result does not depend on the
    order of the clients, ties aside.

    Parameters
    ----------
    gram : (..., n, n) array

    Returns
    -------
    distances : (..., n, n) array
        Squared, between the sorted vectors.
    order : (..., n) array
    """
    distances = squared_distances(gram)
    order = np.argsort(-nearest_sums(distances, m), axis=-1, kind="stable")
    n = gram.shape[-1]
    flat, places = distances.reshape(-1, n, n), order.reshape(-1, n)
    rows = np.arange(len(flat))[:, None, None]
    ordered = flat[rows, places[:, :, None], places[:, None, :]]
    return ordered.reshape(gram.shape), order


def scatter_gram(distances: FloatArray) -> FloatArray:
    """Return the Gram matrix about the mean, (..., m, m), from squared distances.

    Its nonzero eigenvalues are those of the scatter sum_i (x_i - mean)(x_i - mean)^T.
    """
    m = distances.shape[-1]
    if distances.ndim > 2 and m <= _FEW:
        # Many small ones are centred by one product, six times faster than by sums.
        flat = distances.reshape(-1, m * m) @ _centring_matrix(m)
        return flat.reshape(distances.shape)
    # Sums and divisions: numpy's mean takes twice as long for small matrices.
    row = distances.sum(axis=-1, keepdims=True) / m
    column = distances.sum(axis=-2, keepdims=True) / m
    mean = row.sum(axis=-2, keepdims=True) / m
    centred: FloatArray = -0.5 * (distances - row - column + mean)
    return centred


@cache
def _centring_matrix(m: int) -> FloatArray:
    """Return the (m m, m m) matrix that centres flat squared distances of m points."""
    projection = np.eye(m) - 1.0 / m
    return np.asarray(-0.5 * np.kron(projection, projection), dtype=np.float64)


def scatter_lambda(distances: FloatArray, subset: Subset) -> float:
    """Return the largest eigenvalue of the scatter of a subset."""
    if len(subset) < 2:
        return 0.0
    block = distances[np.ix_(subset, subset)]
    return max(0.0, float(np.linalg.eigvalsh(scatter_gram(block))[-1]))


def weighted_lambda(gram: FloatArray, weights: FloatArray) -> float:
    """Return the largest eigenvalue of the covariance under weights of sum 1.

    By inner products: among distances, a vector of norm 1e30 and weight 1e-30 leaves
    no digit of the others.
    """
    used = np.flatnonzero(weights)
    share = weights[used]
    block = gram[np.ix_(used, used)]
    along = block @ share
    centred = block - along[:, None] - along[None, :] + share @ along
    roots = np.sqrt(share)
    values = np.linalg.eigvalsh(roots[:, None] * centred * roots[None, :])
    return max(0.0, float(values[-1]))
