"""The stack of SMEA's depth-first search, and how including and excluding changes it.

`branch_and_bound` defines M, V and `negative`, and proves what the updates rest on.
"""

from typing import NamedTuple

import numpy as np

from flwr_safedshb.aggregation.rule import FloatArray
from flwr_safedshb.aggregation.smea.budget import DECOMPOSITION, work_of_passes
from flwr_safedshb.aggregation.smea.kernels import (
    IntArray,
    compile_kernel,
    inverse_error,
    take_schur_complement,
)

# Columns of SearchState.counts. NEGATIVE may be UNKNOWN, not computed, or DOUBTFUL, not
# to be told from round-off; UNCHECKED is 0, or 1 + the row where V was last changed; a
# solution while NEGATIVE > 0 is all candidates but the rows WITHOUT and AND_WITHOUT.
# The matrices of a level have WIDTH rows, the candidates that it began with.
CANDIDATES, NEEDED, INCLUDED, NEGATIVE, UNCHECKED, PIVOT = 0, 1, 2, 3, 4, 5
WITHOUT, AND_WITHOUT, WIDTH = 6, 7, 8
UNKNOWN, DOUBTFUL = -1, -2
# Entries of SearchState.cursor: the current level; the first level whose matrices are
# there; nodes visited; work done, and how much may be.
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
# when the search comes back to them (`restore_level`).
BYTES = 1 << 26


class SearchState(NamedTuple):
    """A stack with one level for each inclusion that can still be undone.

    Attributes
    ----------
    root : (c, c) array
        M before any decision.
    memory : (2, slots, c * c) array
        M and V of a level, (WIDTH, WIDTH), of which the leading rows and columns are
        those of its candidates (`matrix_at`, `inverse_at`). Level l has slot l modulo
        slots, until a later one takes it.
    ids : (levels, c) array
        Which candidate each row stands for.
    groups : (c,) array
        Candidates of one group are equal vectors: any of them may stand for another.
    included : (c,) array
        Candidates included so far; a level owns the first `counts[level, INCLUDED]`.
    counts : (levels, 9) array
    cursor : (5,) array
    """

    root: FloatArray
    memory: FloatArray
    ids: IntArray
    groups: IntArray
    included: IntArray
    counts: IntArray
    cursor: IntArray


def new_search(matrix: FloatArray, needed: int, groups: IntArray) -> SearchState:
    """Return a search over the rows of M, (c, c), of which `needed` are wanted."""
    c = len(matrix)
    levels = needed + 1
    slots = min(levels, max(2, BYTES // (16 * max(c, 1) ** 2)))
    search = SearchState(
        root=matrix,
        memory=np.empty((2, slots, c * c)),
        ids=np.empty((levels, c), np.int64),
        groups=groups,
        included=np.empty(c, np.int64),
        counts=np.zeros((levels, 9), np.int64),
        cursor=np.zeros(5, np.int64),
    )
    search.ids[0] = np.arange(c)
    search.counts[0] = (c, needed, 0, UNKNOWN, 0, 0, 0, 0, c)
    matrix_at(search, 0)[:] = matrix
    return search


@compile_kernel
def matrix_at(search: SearchState, level: int) -> FloatArray:
    """Return M of a level, a view."""
    width = search.counts[level, WIDTH]
    slot = search.memory[0, level % search.memory.shape[1]]
    matrix: FloatArray = slot[: width * width].reshape(width, width)
    return matrix


@compile_kernel
def inverse_at(search: SearchState, level: int) -> FloatArray:
    """Return V of a level, a view."""
    width = search.counts[level, WIDTH]
    slot = search.memory[1, level % search.memory.shape[1]]
    matrix: FloatArray = slot[: width * width].reshape(width, width)
    return matrix


@compile_kernel
def add_work(search: SearchState, count: int, c: int) -> None:
    """Note the work of passes over a matrix of c rows."""
    search.cursor[WORK] += work_of_passes(count, c)


def solution_rows(search: SearchState) -> IntArray:
    """Return the rows of a solution; more than needed if all of them do."""
    level = search.cursor[LEVEL]
    counts = search.counts[level]
    included = search.included[: counts[INCLUDED]]
    if counts[NEEDED] == 0:
        return included.copy()
    rows = np.arange(counts[CANDIDATES])
    if counts[NEGATIVE] > 0:
        rows = np.setdiff1d(rows, counts[[WITHOUT, AND_WITHOUT]])
    return np.append(included, search.ids[level, rows])


def lower_threshold(search: SearchState, matrix: FloatArray) -> None:
    """Put a running search onto M of a lower threshold, (c, c)."""
    search.root[:] = matrix
    search.cursor[HELD] = search.cursor[LEVEL] + 1


def restore_level(search: SearchState) -> None:
    """Compute M of the current level from the root and the decisions that led to it."""
    level = int(search.cursor[LEVEL])
    counts = search.counts[level]
    c = counts[CANDIDATES]
    rows, taken = search.ids[level, :c], search.included[: counts[INCLUDED]]
    add_work(search, DECOMPOSITION, len(search.root))
    search.cursor[HELD] = level
    counts[NEGATIVE] = UNKNOWN
    block = search.root[np.ix_(rows, rows)]
    if len(taken):
        inner = search.root[np.ix_(taken, taken)]
        if np.linalg.eigvalsh(inner)[0] <= TINY:
            # Not so when it was included: the threshold has fallen since.
            counts[NEEDED] = c + 1
            return
        cross = search.root[np.ix_(taken, rows)]
        block = block - cross.T @ np.linalg.solve(inner, cross)
    counts[WIDTH] = c
    matrix_at(search, level)[:] = 0.5 * (block + block.T)


@compile_kernel
def include_row(search: SearchState, level: int, row: int) -> None:
    """Include the candidate of a row: M becomes its Schur complement there."""
    counts = search.counts[level]
    c = counts[CANDIDATES]
    take_schur_complement(matrix_at(search, level), c, row)
    add_work(search, 1, c)
    search.included[counts[INCLUDED]] = search.ids[level, row]
    counts[INCLUDED] += 1
    counts[NEEDED] -= 1
    if counts[NEGATIVE] == DOUBTFUL:
        counts[NEGATIVE] = UNKNOWN
    _remove_row(search, level, row)


@compile_kernel
def exclude_row(search: SearchState, level: int, row: int) -> None:
    """Exclude the candidate of a row: V becomes its Schur complement there."""
    counts = search.counts[level]
    c = counts[CANDIDATES]
    if level < search.cursor[HELD]:
        _remove_row(search, level, row)
        return
    v = inverse_at(search, level)
    known = counts[NEGATIVE] >= 0 and abs(v[row, row]) >= TRUST
    if not known:
        counts[NEGATIVE] = UNKNOWN
    elif v[row, row] < 0:
        counts[NEGATIVE] -= 1
    # Where that leaves more negative eigenvalues than slack, the level is done with.
    growth = 0.0
    if known and counts[NEGATIVE] < c - counts[NEEDED]:
        growth = np.square(v[row, :c]).max() / abs(v[row, row])
        take_schur_complement(v, c, row)
        add_work(search, 1, c)
        counts[UNCHECKED] = row + 1
    _remove_row(search, level, row)
    if growth > GROWTH:
        check_inverse(search, level)


@compile_kernel
def _remove_row(search: SearchState, level: int, row: int) -> None:
    """Take a row and column out of M and V; the last ones take their place."""
    c = search.counts[level, CANDIDATES]
    if level >= search.cursor[HELD]:
        for matrix in (matrix_at(search, level), inverse_at(search, level)):
            matrix[row, :c] = matrix[c - 1, :c]
            matrix[:c, row] = matrix[:c, c - 1]
    search.ids[level, row] = search.ids[level, c - 1]
    search.counts[level, CANDIDATES] = c - 1


@compile_kernel
def check_inverse(search: SearchState, level: int) -> None:
    """Check V M = I on the row that moved last; forget `negative` where it fails."""
    counts = search.counts[level]
    c = counts[CANDIDATES]
    if counts[NEGATIVE] >= 0 and c > 0:
        row = min(counts[UNCHECKED] - 1, c - 1)
        add_work(search, 1, c)
        v, m = inverse_at(search, level), matrix_at(search, level)
        if not inverse_error(v, m, c, row) <= DRIFT:
            counts[NEGATIVE] = UNKNOWN
    counts[UNCHECKED] = 0


@compile_kernel
def refresh_inverse(search: SearchState, level: int) -> int:
    """Compute V anew; return how many eigenvalues of M are certainly negative."""
    c = search.counts[level, CANDIDATES]
    search.counts[level, UNCHECKED] = 0
    add_work(search, DECOMPOSITION, c)
    values, vectors = np.linalg.eigh(matrix_at(search, level)[:c, :c])
    scale = max(1.0, np.abs(values).max())
    certain = int((values < -TINY * scale).sum())
    if np.abs(values).min() > TRUST * scale:
        inverse_at(search, level)[:c, :c] = (vectors / values) @ vectors.T
        search.counts[level, NEGATIVE] = certain
    else:
        search.counts[level, NEGATIVE] = DOUBTFUL
    return certain
