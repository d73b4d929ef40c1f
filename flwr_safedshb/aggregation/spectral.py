"""Eigenvalues of the scatter of a set of vectors, through their distances."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from flwr_safedshb.aggregation.gram import FloatArray

P = ParamSpec("P")
R = TypeVar("R")

Subset = NDArray[np.intp]

# Two subsets whose eigenvalues differ by less than this factor are a tie.
RESOLUTION = 1e-9

_TINY = 16


@lru_cache(maxsize=1)
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


def single_threaded(function: Callable[P, R]) -> Callable[P, R]:
    """Run a method of a Gram matrix on one BLAS thread.

    Small eigenproblems are far slower on two. Tiny ones are on one anyway, and to see
    to it would cost them more than they take.
    """

    @wraps(function)
    def limited(*args: P.args, **kwargs: P.kwargs) -> R:
        gram = args[1] if len(args) > 1 else None
        if isinstance(gram, np.ndarray) and gram.shape[-1] <= _TINY:
            return function(*args, **kwargs)
        with _controller().limit(limits=1, user_api="blas"):
            return function(*args, **kwargs)

    return limited


def scatter_gram(distances: FloatArray) -> FloatArray:
    """Return the Gram matrix about the mean, (..., m, m), from squared distances.

    Its eigenvalues are those of the scatter sum_i (x_i - mean)(x_i - mean)^T, zeros
    aside.
    """
    # Sums and divisions: numpy's mean takes twice as long for small matrices.
    m = distances.shape[-1]
    row = distances.sum(axis=-1, keepdims=True) / m
    column = distances.sum(axis=-2, keepdims=True) / m
    mean = row.sum(axis=-2, keepdims=True) / m
    centred: FloatArray = -0.5 * (distances - row - column + mean)
    return centred


def scatter_lambda(distances: FloatArray, subset: Subset) -> float:
    """Return the largest eigenvalue of the scatter of a subset."""
    if len(subset) < 2:
        return 0.0
    block = distances[np.ix_(subset, subset)]
    return max(0.0, float(np.linalg.eigvalsh(scatter_gram(block))[-1]))


def weighted_lambda(distances: FloatArray, weights: FloatArray) -> float:
    """Return the largest eigenvalue of the covariance under weights of sum 1."""
    used = np.flatnonzero(weights)
    share = weights[used]
    block = distances[np.ix_(used, used)]
    along = block @ share
    centred = -0.5 * (block - along[:, None] - along[None, :] + share @ along)
    roots = np.sqrt(share)
    values = np.linalg.eigvalsh(roots[:, None] * centred * roots[None, :])
    return max(0.0, float(values[-1]))
