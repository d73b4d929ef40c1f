"""Inner loops of SMEA's search: compiled by numba where it is installed, else numpy.

Compiled loops are ten times faster than compiled array expressions. Interpreted loops
make a whole search slower than array expressions do: 4 times with 30 vectors, 16 times
with 100. So these few functions have a branch for each, of which the compiler prunes
one, and tests hold both to the same results. All else in the search is one source.

Every matrix is symmetric and lives in the first c rows and columns of a larger array:
compiled loops over whole rows are several times faster than over a strided view.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.aggregation.rule import FloatArray

P = ParamSpec("P")
R = TypeVar("R")
IntArray = NDArray[np.int64]

try:
    import numba

    COMPILED = not numba.config.DISABLE_JIT  # type: ignore[attr-defined]
except ImportError:
    COMPILED = False

# Verdicts on the pairs of a set of candidates.
NONE, SOME, UNSURE = 0, 1, 2
# Relative size from which the sign of a 2 x 2 determinant is trusted.
SURE = 1e-6


def compile_kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function`, compiled where numba is installed."""
    if not COMPILED:
        return function
    # numpy's error model: a division by zero is an infinity, not an exception.
    try:
        jit = numba.njit(cache=True, error_model="numpy")(function)
    except RuntimeError:  # no writable place for the cache
        jit = numba.njit(error_model="numpy")(function)
    return cast(Callable[P, R], jit)


@compile_kernel
def take_schur_complement(matrix: FloatArray, c: int, row: int) -> None:
    """Replace a matrix by its Schur complement at `row`, in place."""
    pivot = matrix[row, :c].copy()
    if COMPILED:
        for i in range(c):
            factor = pivot[i] / pivot[row]
            for j in range(c):
                matrix[i, j] -= factor * pivot[j]
    else:
        matrix[:c, :c] -= np.outer(pivot / pivot[row], pivot)


@compile_kernel
def inverse_error(inverse: FloatArray, matrix: FloatArray, c: int, row: int) -> float:
    """Return the largest error in one row of inverse @ matrix = identity."""
    if COMPILED:
        product = np.zeros(c)
        for j in range(c):
            factor = inverse[row, j]
            for i in range(c):
                product[i] += factor * matrix[j, i]
    else:
        product = inverse[row, :c] @ matrix[:c, :c]
    product[row] -= 1.0
    largest: float = np.abs(product).max()
    return largest


@compile_kernel
def count_conflicts(matrix: FloatArray, c: int) -> tuple[IntArray, FloatArray]:
    """Count conflicts and weigh relations between candidates, M_jj > 0.

    Returns
    -------
    degrees : (c,) array
        For each j the number of k with M_jj M_kk <= M_jk^2.
    scores : (c,) array
        For each j the sum over k != j of M_jk^2/(M_jj M_kk).
    """
    if COMPILED:
        scale = 1.0 / np.diag(matrix[:c, :c])
        degrees = np.zeros(c, np.int64)
        scores = np.zeros(c)
        for j in range(c):
            # All k first, k = j taken back: a loop without a branch is a vector loop.
            for k in range(c):
                cosine = matrix[j, k] * matrix[j, k] * (scale[j] * scale[k])
                scores[k] += cosine
                degrees[k] += cosine >= 1.0
            cosine = matrix[j, j] * matrix[j, j] * (scale[j] * scale[j])
            scores[j] -= cosine
            degrees[j] -= cosine >= 1.0
        return degrees, scores
    diagonal = np.diag(matrix[:c, :c])
    cosines = matrix[:c, :c] ** 2 / np.outer(diagonal, diagonal)
    np.fill_diagonal(cosines, 0.0)
    return (cosines >= 1.0).sum(axis=0), cosines.sum(axis=0)


@compile_kernel
def matching_exceeds(matrix: FloatArray, c: int, degrees: IntArray, slack: int) -> bool:
    """Return True if a greedy matching of conflicting pairs is larger than `slack`."""
    diagonal = np.diag(matrix[:c, :c])
    free = degrees > 0
    left = free.sum()
    pairs = 0
    for j in np.flatnonzero(free):
        if not free[j]:
            continue
        if 2 * (slack - pairs + 1) > left:
            break
        free[j] = False
        left -= 1
        # Those before j are not free any more.
        partner = c
        if COMPILED:
            for k in range(j + 1, c):
                if free[k] and matrix[j, k] ** 2 >= diagonal[j] * diagonal[k]:
                    partner = k
                    break
        else:
            others = free & (matrix[j, :c] ** 2 >= diagonal[j] * diagonal)
            partner = int(np.argmax(others)) if others.any() else c
        if partner < c:
            free[partner] = False
            left -= 1
            pairs += 1
    return pairs > slack


@compile_kernel
def count_partners(inverse: FloatArray, c: int, sign: float) -> IntArray:
    """Count for each j the k != j with sign * (V_jj V_kk - V_jk^2) > 0, or nearly."""
    diagonal = np.diag(inverse[:c, :c]).copy()
    if COMPILED:
        counts = np.zeros(c, np.int64)
        for j in range(c):
            for k in range(c):
                square = inverse[j, k] * inverse[j, k]
                product = diagonal[j] * diagonal[k]
                margin = SURE * (abs(product) + square)
                counts[k] += sign * (product - square) > -margin
    else:
        squares = inverse[:c, :c] ** 2
        products = np.outer(diagonal, diagonal)
        near = sign * (products - squares) > -SURE * (np.abs(products) + squares)
        counts = near.sum(axis=0)
    counts -= diagonal != 0.0
    return counts


@compile_kernel
def find_pair(inverse: FloatArray, c: int, sign: float) -> tuple[int, int, int]:
    """Look for j, k with sign * (V_jj V_kk - V_jk^2) > 0.

    Returns
    -------
    j, k, verdict
        A pair and SOME, or NONE, or UNSURE if round-off may hide one.
    """
    if COMPILED:
        verdict = NONE
        for j in range(c):
            for k in range(c):
                square = inverse[j, k] * inverse[j, k]
                product = inverse[j, j] * inverse[k, k]
                determinant = sign * (product - square)
                margin = SURE * (abs(product) + square)
                if j != k and determinant >= margin:
                    return j, k, SOME
                if j != k and determinant > -margin:
                    verdict = UNSURE
        return -1, -1, verdict
    diagonal = np.diag(inverse[:c, :c])
    squares = inverse[:c, :c] ** 2
    products = np.outer(diagonal, diagonal)
    determinants = sign * (products - squares)
    margins = SURE * (np.abs(products) + squares)
    pairs = ~np.eye(c, dtype=np.bool_)
    first = int(np.argmax(pairs & (determinants >= margins)))
    j, k = divmod(first, c)
    if j != k and determinants[j, k] >= margins[j, k]:
        return j, k, SOME
    return -1, -1, UNSURE if (pairs & (determinants > -margins)).any() else NONE
