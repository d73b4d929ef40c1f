r"""Branch and bound for a positive definite principal submatrix of a given size.

This is SMEA's decision. Let D be squared distances, m = n - f, a a member of S, y_i =
x_i - x_a and G_ij = <y_i, y_j>. With P = I - 1 1^T/m, the largest eigenvalue of the
scatter of S is below t exactly if tI - Y P Y^T is positive definite on S \ {a}; P
restricted to these m - 1 points has the inverse I + 1 1^T, so this is

    M_S = (I + 1 1^T) - G/t  positive definite on S \ {a},

and M does not depend on S. The search includes or excludes one candidate at a time:

- include j: M becomes its Schur complement at j; the inverse V = M^-1 drops row j;
- exclude j: M drops row j; V becomes its Schur complement at j.

With `slack` = candidates - needed, the number that must still be excluded, and
`negative` = the number of negative eigenvalues of M on the candidates:

- M_jj <= 0: j is out. M_jj M_kk <= M_jk^2: j and k are not both in; more than slack
  such k: j is out; a matching of more than slack such pairs: nothing here.
- each exclusion takes away at most one negative eigenvalue (interlacing): negative >
  slack: nothing here; negative = 0: every choice that is left will do; negative =
  slack or slack - 1: as the inertia of M is that of its rest plus that of V_RR, the
  excluded set R has V_RR with no or one positive eigenvalue. So V_jj >= 0: j is in, for
  negative = slack; and fewer than slack - 1 partners to go with: j is in.

`negative` follows from signs: including leaves it, excluding j lowers it by one exactly
if V_jj < 0. No sign is trusted within round-off: V is refreshed from an eigenvalue
decomposition where it drifts, and where M is nearly singular the search branches
without it. M itself is safe: along the path to a positive definite submatrix its
updates are those of a Cholesky factorisation.

`example` goes through all of this with seven points in words.
"""

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.aggregation.smea import search_state as st
from flwr_safedshb.aggregation.smea.kernels import (
    NONE,
    SOME,
    compile_kernel,
    count_conflicts,
    count_partners,
    find_pair,
    matching_exceeds,
)
from flwr_safedshb.aggregation.smea.search_state import SearchState

# Verdicts on a level or on a whole search. STALE: the level has to be restored.
EXHAUSTED, OUT_OF_WORK, SOLVED, PRUNED, OPEN, CHANGED, STALE = 0, 1, 2, 3, 4, 5, 6
# Preference for pivots whose exclusion is costly; of 0 to 1, this visited fewest nodes.
COSTLY = 0.25


def reject_solution(search: SearchState) -> None:
    """Go on after a solution that proved to be within round-off of the threshold."""
    counts = search.counts[search.cursor[st.LEVEL]]
    if counts[st.NEEDED] == 0:
        backtrack(search)
    else:
        counts[st.NEGATIVE] = st.DOUBTFUL


@compile_kernel
def advance_search(search: SearchState, work: int) -> int:
    """Search until there is a solution, nothing is left, or `work` more is done."""
    cursor = search.cursor
    cursor[st.LIMIT] = cursor[st.WORK] + work
    while cursor[st.LEVEL] >= 0:
        level = cursor[st.LEVEL]
        if level < cursor[st.HELD]:
            return STALE
        verdict = _propagate(search, level)
        if verdict in (SOLVED, OUT_OF_WORK):
            return verdict
        cursor[st.NODES] += 1
        if verdict == OPEN:
            _branch(search, level)
        else:
            backtrack(search)
    return EXHAUSTED


@compile_kernel
def backtrack(search: SearchState) -> None:
    """Leave the current level and exclude the pivot of the one above.

    Exclude every candidate that equals it, too: a set that has one of them in place of
    the pivot is as good as one with the pivot, and those have been seen.
    """
    search.cursor[st.LEVEL] -= 1
    level = search.cursor[st.LEVEL]
    if level >= 0:
        pivot = search.counts[level, st.PIVOT]
        group = search.groups[search.ids[level, pivot]]
        st.exclude_row(search, level, pivot)
        for row in range(search.counts[level, st.CANDIDATES] - 1, -1, -1):
            if search.groups[search.ids[level, row]] == group:
                st.exclude_row(search, level, row)


@compile_kernel
def _propagate(search: SearchState, level: int) -> int:
    """Draw every conclusion at a level, in place; where work ends, go on from there."""
    counts = search.counts[level]
    matrix, dual = st.matrix_at(search, level), st.inverse_at(search, level)
    while True:
        if search.cursor[st.WORK] >= search.cursor[st.LIMIT]:
            return OUT_OF_WORK
        c = counts[st.CANDIDATES]
        slack = c - counts[st.NEEDED]
        if slack < 0 or counts[st.NEGATIVE] > slack:
            return PRUNED
        if counts[st.NEEDED] == 0:
            return SOLVED
        st.add_work(search, 1, 0)
        row = int(np.argmin(np.diag(matrix[:c, :c])))
        if matrix[row, row] <= st.TINY:
            st.exclude_row(search, level, row)
            continue
        if counts[st.UNCHECKED]:
            st.check_inverse(search, level)
        unknown = counts[st.NEGATIVE] == st.UNKNOWN
        if unknown and st.refresh_inverse(search, level) > slack:
            return PRUNED
        negative = counts[st.NEGATIVE]
        if negative == 0:
            return SOLVED
        if negative > 0:
            verdict = _propagate_inverse(search, level)
            if verdict == CHANGED:
                continue
            if verdict != OPEN:
                return verdict
        st.add_work(search, 2, c)
        degrees, scores = count_conflicts(matrix, c)
        busiest = int(np.argmax(degrees))
        if degrees[busiest] > slack:
            st.exclude_row(search, level, busiest)
            continue
        if degrees[busiest] > 0:
            st.add_work(search, 1, c)
            if matching_exceeds(matrix, c, degrees, slack):
                return PRUNED
            counts[st.PIVOT] = busiest
        else:
            if negative > 0:
                # To exclude these costs slack and takes no negative eigenvalue away.
                scores *= 1.0 + COSTLY * (np.diag(dual[:c, :c]) > 0)
            # Equal candidates first: excluding one excludes them all.
            groups = search.groups[search.ids[level, :c]]
            scores += (np.bincount(groups)[groups] > 1) * np.float64(c)
            counts[st.PIVOT] = np.argmax(scores)
        return OPEN


@compile_kernel
def _propagate_inverse(search: SearchState, level: int) -> int:
    """Draw conclusions from V: PRUNED, SOLVED, CHANGED or OPEN.

    A set R of `slack` candidates may go exactly if V_RR has `negative` negative
    eigenvalues, so `slack - negative` positive ones.
    """
    counts = search.counts[level]
    c, negative = counts[st.CANDIDATES], counts[st.NEGATIVE]
    slack = c - counts[st.NEEDED]
    dual = st.inverse_at(search, level)
    diagonal = np.diag(dual[:c, :c])
    if negative == slack:
        highest = diagonal.max()
        if highest >= st.TRUST:
            return _include_all(search, level, diagonal >= st.TRUST)
        if slack > 1 and highest > -st.TRUST:
            return OPEN
        if slack == 1:
            row = int(np.argmin(diagonal))
            if diagonal[row] > -st.TRUST:
                return OPEN
            return _note_solution(search, level, row, row)
    elif negative < slack - 1:
        return OPEN
    # No positive eigenvalue: no indefinite pair. One of them: no positive definite
    # pair, so what goes with j where V_jj > 0 makes an indefinite pair with it.
    sign = 1.0 if negative == slack else -1.0
    st.add_work(search, 2, c)
    if slack == 2:
        j, k, pairs = find_pair(dual, c, sign)
        if pairs == SOME:
            return _note_solution(search, level, j, k)
        return PRUNED if pairs == NONE else OPEN
    alone = count_partners(dual, c, sign) < slack - 1
    if negative < slack:
        alone &= diagonal >= st.TRUST
    return _include_all(search, level, alone)


@compile_kernel
def _note_solution(search: SearchState, level: int, j: int, k: int) -> int:
    """Note one solution; the level stays, for the others."""
    search.counts[level, st.WITHOUT] = j
    search.counts[level, st.AND_WITHOUT] = k
    return SOLVED


@compile_kernel
def _include_all(search: SearchState, level: int, rows: NDArray[np.bool_]) -> int:
    """Include rows that must be in: PRUNED if they cannot, CHANGED, OPEN if none."""
    verdict = OPEN
    # From the last, because what takes the place of a row comes from behind it.
    for row in np.flatnonzero(rows)[::-1]:
        if st.matrix_at(search, level)[row, row] <= st.TINY:
            return PRUNED
        if search.counts[level, st.NEEDED] == 0:
            return PRUNED
        st.include_row(search, level, row)
        verdict = CHANGED
        if search.cursor[st.WORK] >= search.cursor[st.LIMIT]:
            break
    return verdict


@compile_kernel
def _branch(search: SearchState, level: int) -> None:
    """Open the next level: the current one with its pivot included."""
    c = search.counts[level, st.CANDIDATES]
    pivot = search.counts[level, st.PIVOT]
    search.ids[level + 1, :c] = search.ids[level, :c]
    search.counts[level + 1] = search.counts[level]
    search.counts[level + 1, st.WIDTH] = c
    st.matrix_at(search, level + 1)[:] = st.matrix_at(search, level)[:c, :c]
    st.inverse_at(search, level + 1)[:] = st.inverse_at(search, level)[:c, :c]
    st.add_work(search, 2, c)
    oldest = level + 2 - search.memory.shape[1]
    search.cursor[st.HELD] = max(search.cursor[st.HELD], oldest)
    search.cursor[st.LEVEL] = level + 1
    st.include_row(search, level + 1, pivot)
