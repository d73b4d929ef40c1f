"""The stack of SMEA's search: what a level knows, and how it changes.

The letters are those of `kernel`, which says what the changes mean.
"""

from typing import NamedTuple

import numpy as np

from flwr_safedshb.aggregation.rule import FloatArray
from flwr_safedshb.aggregation.smea.budget import DECOMPOSITION, passes
from flwr_safedshb.aggregation.smea.jit import compiled
from flwr_safedshb.aggregation.smea.loops import IntArray, eliminate, residual

# Columns of Stack.counts. NEGATIVE may be UNKNOWN, not computed, or DOUBTFUL, not to be
# told from round-off; UNCHECKED is 0, or 1 + the row where V was last changed; a find
# while NEGATIVE > 0 is that of all candidates but the rows WITHOUT and AND_WITHOUT. The
# matrices of a level have WIDTH rows, the candidates that it began with.
CANDIDATES, NEEDED, INCLUDED, NEGATIVE, UNCHECKED, PIVOT = 0, 1, 2, 3, 4, 5
WITHOUT, AND_WITHOUT, WIDTH = 6, 7, 8
UNKNOWN, DOUBTFUL = -1, -2
# Entries of Stack.cursor: the current level; the first level whose matrices are there;
# nodes visited; work done, and how much may be.
LEVEL, HELD, NODES, WORK, LIMIT = 0, 1, 2, 3, 4

# A submatrix with an eigenvalue below TINY may be missed: a set better than t by a
# factor of less than 1 - TINY.
TINY = 1e-11
TRUST = 1e-8
DRIFT = 1e-7
# An exclusion that can magnify round-off in V by more than this is checked at once,
# others before V is used to conclude.
GROWTH = 1e3
# What the matrices of all levels may take. Levels that do not fit are computed anew
# when the search comes back to them (`restore`).
BYTES = 1 << 26


class Stack(NamedTuple):
    """Depth-first search: one level for each inclusion that can still be undone.

    Attributes
    ----------
    root : (c, c) array
        M before any decision.
    memory : (2, slots, c * c) array
        M and V of a level, (WIDTH, WIDTH), of which the leading rows and columns are
        those of its candidates (`schur`, `inverse`). Level l has slot l modulo slots,
        until a later one takes it.
    ids : (levels, c) array
        Which candidate each row stands for.
    kinds : (c,) array
        Candidates of one kind are equal vectors: any of them may stand for another.
    included : (c,) array
        Candidates included so far; a level owns the first `counts[level, INCLUDED]`.
    counts : (levels, 9) array
    cursor : (5,) array
    """

    root: FloatArray
    memory: FloatArray
    ids: IntArray
    kinds: IntArray
    included: IntArray
    counts: IntArray
    cursor: IntArray


def new_stack(matrix: FloatArray, needed: int, kinds: IntArray) -> Stack:
    """Return a search over the rows of M, (c, c), of which `needed` are wanted."""
    c = len(matrix)
    levels = needed + 1
    slots = min(levels, max(2, BYTES // (16 * max(c, 1) ** 2)))
    stack = Stack(
        root=matrix,
        memory=np.empty((2, slots, c * c)),
        ids=np.empty((levels, c), np.int64),
        kinds=kinds,
        included=np.empty(c, np.int64),
        counts=np.zeros((levels, 9), np.int64),
        cursor=np.zeros(5, np.int64),
    )
    stack.ids[0] = np.arange(c)
    stack.counts[0] = (c, needed, 0, UNKNOWN, 0, 0, 0, 0, c)
    schur(stack, 0)[:] = matrix
    return stack


@compiled
def schur(stack: Stack, level: int) -> FloatArray:
    """Return M of a level."""
    width = stack.counts[level, WIDTH]
    slot = stack.memory[0, level % stack.memory.shape[1]]
    matrix: FloatArray = slot[: width * width].reshape(width, width)
    return matrix


@compiled
def inverse(stack: Stack, level: int) -> FloatArray:
    """Return V of a level."""
    width = stack.counts[level, WIDTH]
    slot = stack.memory[1, level % stack.memory.shape[1]]
    matrix: FloatArray = slot[: width * width].reshape(width, width)
    return matrix


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


def restore(stack: Stack) -> None:
    """Compute M of the current level from the root and the decisions that led to it."""
    level = int(stack.cursor[LEVEL])
    counts = stack.counts[level]
    c = counts[CANDIDATES]
    rows, taken = stack.ids[level, :c], stack.included[: counts[INCLUDED]]
    spend(stack, DECOMPOSITION, len(stack.root))
    stack.cursor[HELD] = level
    counts[NEGATIVE] = UNKNOWN
    block = stack.root[np.ix_(rows, rows)]
    if len(taken):
        inner = stack.root[np.ix_(taken, taken)]
        if np.linalg.eigvalsh(inner)[0] <= TINY:
            # Not so when it was included: the threshold has fallen since.
            counts[NEEDED] = c + 1
            return
        cross = stack.root[np.ix_(taken, rows)]
        block = block - cross.T @ np.linalg.solve(inner, cross)
    counts[WIDTH] = c
    schur(stack, level)[:] = 0.5 * (block + block.T)


def lower(stack: Stack, matrix: FloatArray) -> None:
    """Put a running search onto the matrix of a lower threshold."""
    stack.root[:] = matrix
    stack.cursor[HELD] = stack.cursor[LEVEL] + 1


@compiled
def spend(stack: Stack, count: int, c: int) -> None:
    """Note the work of passes over a matrix of c rows."""
    stack.cursor[WORK] += passes(count, c)


@compiled
def include(stack: Stack, level: int, row: int) -> None:
    """Include the candidate of a row: M becomes its Schur complement there."""
    counts = stack.counts[level]
    c = counts[CANDIDATES]
    eliminate(schur(stack, level), c, row)
    spend(stack, 1, c)
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
    if level < stack.cursor[HELD]:
        _drop(stack, level, row)
        return
    v = inverse(stack, level)
    known = counts[NEGATIVE] >= 0 and abs(v[row, row]) >= TRUST
    if not known:
        counts[NEGATIVE] = UNKNOWN
    elif v[row, row] < 0:
        counts[NEGATIVE] -= 1
    # Where that leaves more negative eigenvalues than slack, the level is done with.
    if known and counts[NEGATIVE] < c - counts[NEEDED]:
        growth = np.square(v[row, :c]).max() / abs(v[row, row])
        eliminate(v, c, row)
        spend(stack, 1, c)
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
        spend(stack, 1, c)
        if not residual(inverse(stack, level), schur(stack, level), c, row) <= DRIFT:
            counts[NEGATIVE] = UNKNOWN
    counts[UNCHECKED] = 0


@compiled
def _drop(stack: Stack, level: int, row: int) -> None:
    """Take a row and column out of M and V; the last ones take their place."""
    c = stack.counts[level, CANDIDATES]
    if level >= stack.cursor[HELD]:
        for matrix in (schur(stack, level), inverse(stack, level)):
            matrix[row, :c] = matrix[c - 1, :c]
            matrix[:c, row] = matrix[:c, c - 1]
    stack.ids[level, row] = stack.ids[level, c - 1]
    stack.counts[level, CANDIDATES] = c - 1


@compiled
def refresh(stack: Stack, level: int) -> int:
    """Compute V anew; return how many eigenvalues of M are certainly negative."""
    c = stack.counts[level, CANDIDATES]
    stack.counts[level, UNCHECKED] = 0
    spend(stack, DECOMPOSITION, c)
    values, vectors = np.linalg.eigh(schur(stack, level)[:c, :c])
    scale = max(1.0, np.abs(values).max())
    certain = int((values < -TINY * scale).sum())
    if np.abs(values).min() > TRUST * scale:
        inverse(stack, level)[:c, :c] = (vectors / values) @ vectors.T
        stack.counts[level, NEGATIVE] = certain
    else:
        stack.counts[level, NEGATIVE] = DOUBTFUL
    return certain
