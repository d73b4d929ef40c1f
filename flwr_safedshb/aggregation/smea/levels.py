"""The stack of SMEA's search: what a level knows, and how it changes.

The letters are those of `kernel`, which says what the changes mean.
"""

from typing import NamedTuple

import numpy as np

from flwr_safedshb.aggregation.gram import FloatArray
from flwr_safedshb.aggregation.smea.compiled import compiled
from flwr_safedshb.aggregation.smea.primitives import IntArray, eliminate, residual

# Columns of Stack.counts. NEGATIVE may be UNKNOWN, not computed, or DOUBTFUL, not to be
# told from round-off; UNCHECKED is 0, or 1 + the row where V was last changed; a find
# while NEGATIVE > 0 is that of all candidates but the rows WITHOUT and AND_WITHOUT.
CANDIDATES, NEEDED, INCLUDED, NEGATIVE, UNCHECKED, PIVOT = 0, 1, 2, 3, 4, 5
WITHOUT, AND_WITHOUT = 6, 7
UNKNOWN, DOUBTFUL = -1, -2
# Entries of Stack.cursor.
LEVEL, NODES = 0, 1

# A submatrix with an eigenvalue below TINY may be missed: a set better than t by a
# factor of less than 1 - TINY.
TINY = 1e-11
TRUST = 1e-8
DRIFT = 1e-7
# An exclusion that can magnify round-off in V by more than this is checked at once,
# others before V is used to conclude.
GROWTH = 1e3


class Stack(NamedTuple):
    """Depth-first search: one level for each inclusion that can still be undone.

    Attributes
    ----------
    schur, inverse : (levels, c, c) arrays
        M and V on the candidates of each level, in the leading rows and columns.
    ids : (levels, c) array
        Which candidate each row stands for.
    kinds : (c,) array
        Candidates of one kind are equal vectors: any of them may stand for another.
    included : (c,) array
        Candidates included so far; a level owns the first `counts[level, INCLUDED]`.
    counts : (levels, 8) array
    cursor : (2,) array
        Current level, nodes visited.
    """

    schur: FloatArray
    inverse: FloatArray
    ids: IntArray
    kinds: IntArray
    included: IntArray
    counts: IntArray
    cursor: IntArray


def new_stack(matrix: FloatArray, needed: int, kinds: IntArray) -> Stack:
    """Return a search over the rows of M, (c, c), of which `needed` are wanted."""
    c = len(matrix)
    levels = needed + 1
    stack = Stack(
        schur=np.empty((levels, c, c)),
        inverse=np.empty((levels, c, c)),
        ids=np.empty((levels, c), np.int64),
        kinds=kinds,
        included=np.empty(c, np.int64),
        counts=np.zeros((levels, 8), np.int64),
        cursor=np.zeros(2, np.int64),
    )
    stack.schur[0] = matrix
    stack.ids[0] = np.arange(c)
    stack.counts[0] = (c, needed, 0, UNKNOWN, 0, 0, 0, 0)
    return stack


def found(stack: Stack) -> IntArray:
    """Return the rows of a set that was found; more than needed if all of them do."""
    counts = stack.counts[stack.cursor[LEVEL]]
    included = stack.included[: counts[INCLUDED]]
    if counts[NEEDED] == 0:
        return included.copy()
    rows = np.arange(counts[CANDIDATES])
    if counts[NEGATIVE] > 0:
        rows = np.setdiff1d(rows, counts[[WITHOUT, AND_WITHOUT]])
    return np.append(included, stack.ids[stack.cursor[LEVEL], rows])


def close(stack: Stack, level: int) -> None:
    """Mark a level as one that leads nowhere."""
    stack.counts[level, NEEDED] = stack.counts[level, CANDIDATES] + 1


@compiled
def include(stack: Stack, level: int, row: int) -> None:
    """Include the candidate of a row: M becomes its Schur complement there."""
    counts = stack.counts[level]
    c = counts[CANDIDATES]
    eliminate(stack.schur[level], c, row)
    stack.included[counts[INCLUDED]] = stack.ids[level, row]
    counts[INCLUDED] += 1
    counts[NEEDED] -= 1
    if counts[NEGATIVE] == DOUBTFUL:
        counts[NEGATIVE] = UNKNOWN
    _drop(stack, level, row)


@compiled
def exclude(stack: Stack, level: int, row: int) -> None:
    """Exclude the candidate of a row: V becomes its Schur complement there."""
    counts = stack.counts[level]
    c = counts[CANDIDATES]
    inverse = stack.inverse[level]
    known = counts[NEGATIVE] >= 0 and abs(inverse[row, row]) >= TRUST
    if not known:
        counts[NEGATIVE] = UNKNOWN
    elif inverse[row, row] < 0:
        counts[NEGATIVE] -= 1
    # Where that leaves more negative eigenvalues than slack, the level is done with.
    if known and counts[NEGATIVE] < c - counts[NEEDED]:
        growth = np.square(inverse[row, :c]).max() / abs(inverse[row, row])
        eliminate(inverse, c, row)
        counts[UNCHECKED] = row + 1
        _drop(stack, level, row)
        if growth > GROWTH:
            check_inverse(stack, level)
    else:
        _drop(stack, level, row)


@compiled
def check_inverse(stack: Stack, level: int) -> None:
    """Check V M = I on the row that moved last; V is not known any more if it fails."""
    counts = stack.counts[level]
    c = counts[CANDIDATES]
    if counts[NEGATIVE] >= 0 and c > 0:
        row = min(counts[UNCHECKED] - 1, c - 1)
        if not residual(stack.inverse[level], stack.schur[level], c, row) <= DRIFT:
            counts[NEGATIVE] = UNKNOWN
    counts[UNCHECKED] = 0


@compiled
def _drop(stack: Stack, level: int, row: int) -> None:
    """Take a row and column out of M and V; the last ones take their place."""
    c = stack.counts[level, CANDIDATES]
    for matrix in (stack.schur[level], stack.inverse[level]):
        matrix[row, :c] = matrix[c - 1, :c]
        matrix[:c, row] = matrix[:c, c - 1]
    stack.ids[level, row] = stack.ids[level, c - 1]
    stack.counts[level, CANDIDATES] = c - 1


@compiled
def refresh(stack: Stack, level: int) -> int:
    """Compute V anew; return how many eigenvalues of M are certainly negative."""
    c = stack.counts[level, CANDIDATES]
    stack.counts[level, UNCHECKED] = 0
    values, vectors = np.linalg.eigh(stack.schur[level, :c, :c])
    scale = max(1.0, np.abs(values).max())
    certain = int((values < -TINY * scale).sum())
    if np.abs(values).min() > TRUST * scale:
        stack.inverse[level, :c, :c] = (vectors / values) @ vectors.T
        stack.counts[level, NEGATIVE] = certain
    else:
        stack.counts[level, NEGATIVE] = DOUBTFUL
    return certain
