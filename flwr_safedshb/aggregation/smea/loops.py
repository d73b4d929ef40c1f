"""The inner loops of SMEA's search, as numpy and as loops for the compiler.

Every matrix is symmetric and lives in the first c rows and columns of a larger array:
compiled loops over whole rows are several times faster than over a strided view.
"""

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.aggregation.rule import FloatArray
from flwr_safedshb.aggregation.smea.jit import compiled_for

IntArray = NDArray[np.int64]

# Verdicts on the pairs of a set of candidates.
NONE, SOME, UNSURE = 0, 1, 2
# Relative size from which the sign of a 2 x 2 determinant is trusted.
SURE = 1e-6


def lowest_vectorised(matrix: FloatArray, c: int) -> int:
    """Return the row with the smallest diagonal entry."""
    return int(np.argmin(np.diag(matrix[:c, :c])))


@compiled_for(lowest_vectorised)
def lowest(matrix: FloatArray, c: int) -> int:
    """Loops of `lowest_vectorised`."""
    row = 0
    for j in range(1, c):
        if matrix[j, j] < matrix[row, row]:
            row = j
    return row


def highest_vectorised(matrix: FloatArray, c: int) -> int:
    """Return the row with the largest diagonal entry."""
    return int(np.argmax(np.diag(matrix[:c, :c])))


@compiled_for(highest_vectorised)
def highest(matrix: FloatArray, c: int) -> int:
    """Loops of `highest_vectorised`."""
    row = 0
    for j in range(1, c):
        if matrix[j, j] > matrix[row, row]:
            row = j
    return row


def eliminate_vectorised(matrix: FloatArray, c: int, row: int) -> None:
    """Replace a matrix by its Schur complement at `row`, in place."""
    pivot = matrix[row, :c].copy()
    matrix[:c, :c] -= np.outer(pivot / pivot[row], pivot)


@compiled_for(eliminate_vectorised)
def eliminate(matrix: FloatArray, c: int, row: int) -> None:
    """Loops of `eliminate_vectorised`."""
    pivot = matrix[row, :c].copy()
    for i in range(c):
        factor = pivot[i] / pivot[row]
        for j in range(c):
            matrix[i, j] -= factor * pivot[j]


def residual_vectorised(
    inverse: FloatArray, matrix: FloatArray, c: int, row: int
) -> float:
    """Return the largest error in one row of inverse @ matrix = identity."""
    product = inverse[row, :c] @ matrix[:c, :c]
    product[row] -= 1.0
    return float(np.abs(product).max())


@compiled_for(residual_vectorised)
def residual(inverse: FloatArray, matrix: FloatArray, c: int, row: int) -> float:
    """Loops of `residual_vectorised`."""
    product = np.zeros(c)
    for j in range(c):
        factor = inverse[row, j]
        for i in range(c):
            product[i] += factor * matrix[j, i]
    product[row] -= 1.0
    largest: float = np.abs(product).max()
    return largest


def conflicts_vectorised(matrix: FloatArray, c: int) -> tuple[IntArray, FloatArray]:
    """Count conflicts and weigh relations between candidates, M_jj > 0.

    Returns
    -------
    degrees : (c,) array
        For each j the number of k with M_jj M_kk <= M_jk^2.
    scores : (c,) array
        For each j the sum over k != j of M_jk^2/(M_jj M_kk).
    """
    diagonal = np.diag(matrix[:c, :c])
    cosines = matrix[:c, :c] ** 2 / np.outer(diagonal, diagonal)
    np.fill_diagonal(cosines, 0.0)
    return (cosines >= 1.0).sum(axis=0), cosines.sum(axis=0)


@compiled_for(conflicts_vectorised)
def conflicts(matrix: FloatArray, c: int) -> tuple[IntArray, FloatArray]:
    """Loops of `conflicts_vectorised`."""
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


def matching_exceeds_vectorised(
    matrix: FloatArray, c: int, degrees: IntArray, slack: int
) -> bool:
    """Say whether a greedy matching of conflicting pairs is larger than `slack`."""
    free = degrees > 0
    diagonal = np.diag(matrix[:c, :c])
    pairs = 0
    for j in np.flatnonzero(free):
        if 2 * (slack - pairs + 1) > free.sum():
            return False
        if free[j]:
            free[j] = False
            others = free & (matrix[j, :c] ** 2 >= diagonal[j] * diagonal)
            if others.any():
                free[np.argmax(others)] = False
                pairs += 1
    return pairs > slack


@compiled_for(matching_exceeds_vectorised)
def matching_exceeds(matrix: FloatArray, c: int, degrees: IntArray, slack: int) -> bool:
    """Loops of `matching_exceeds_vectorised`."""
    free = degrees > 0
    left = free.sum()
    pairs = 0
    for j in range(c):
        if not free[j]:
            continue
        if 2 * (slack - pairs + 1) > left:
            break
        free[j] = False
        left -= 1
        # Those before j are not free any more.
        for k in range(j + 1, c):
            if free[k] and matrix[j, k] * matrix[j, k] >= matrix[j, j] * matrix[k, k]:
                free[k] = False
                left -= 1
                pairs += 1
                break
    return pairs > slack


def partners_vectorised(inverse: FloatArray, c: int, sign: float) -> IntArray:
    """Count for each j the k != j with sign * (V_jj V_kk - V_jk^2) > 0, or nearly."""
    diagonal = np.diag(inverse[:c, :c])
    squares = inverse[:c, :c] ** 2
    products = np.outer(diagonal, diagonal)
    near = sign * (products - squares) > -SURE * (np.abs(products) + squares)
    counts: IntArray = near.sum(axis=0) - np.diag(near)
    return counts


@compiled_for(partners_vectorised)
def partners(inverse: FloatArray, c: int, sign: float) -> IntArray:
    """Loops of `partners_vectorised`."""
    diagonal = np.diag(inverse[:c, :c]).copy()
    counts = np.zeros(c, np.int64)
    for j in range(c):
        for k in range(c):
            square = inverse[j, k] * inverse[j, k]
            product = diagonal[j] * diagonal[k]
            margin = SURE * (abs(product) + square)
            counts[k] += sign * (product - square) > -margin
        counts[j] -= diagonal[j] != 0.0
    return counts


def find_pair_vectorised(
    inverse: FloatArray, c: int, sign: float
) -> tuple[int, int, int]:
    """Look for j, k with sign * (V_jj V_kk - V_jk^2) > 0.

    Returns
    -------
    j, k, verdict
        A pair and SOME, or NONE, or UNSURE if round-off may hide one.
    """
    diagonal = np.diag(inverse[:c, :c])
    squares = inverse[:c, :c] ** 2
    products = np.outer(diagonal, diagonal)
    determinants = sign * (products - squares)
    margins = SURE * (np.abs(products) + squares)
    pairs = ~np.eye(c, dtype=bool)
    first = int(np.argmax(pairs & (determinants >= margins)))
    j, k = divmod(first, c)
    if j != k and determinants[j, k] >= margins[j, k]:
        return j, k, SOME
    return -1, -1, UNSURE if (pairs & (determinants > -margins)).any() else NONE


@compiled_for(find_pair_vectorised)
def find_pair(inverse: FloatArray, c: int, sign: float) -> tuple[int, int, int]:
    """Loops of `find_pair_vectorised`."""
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
