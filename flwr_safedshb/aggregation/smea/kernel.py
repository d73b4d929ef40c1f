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

`example` goes through all of this with seven points.
"""

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.aggregation.smea.jit import compiled
from flwr_safedshb.aggregation.smea.loops import (
    NONE,
    SOME,
    conflicts,
    find_pair,
    highest,
    lowest,
    matching_exceeds,
    partners,
)
from flwr_safedshb.aggregation.smea.search_state import (
    AND_WITHOUT,
    CANDIDATES,
    DOUBTFUL,
    HELD,
    LEVEL,
    LIMIT,
    NEEDED,
    NEGATIVE,
    NODES,
    PIVOT,
    TINY,
    TRUST,
    UNCHECKED,
    UNKNOWN,
    WIDTH,
    WITHOUT,
    WORK,
    Stack,
    check_inverse,
    exclude,
    include,
    inverse,
    refresh,
    schur,
    spend,
)

# What a step of the search ended with. STALE: the level has to be restored.
EXHAUSTED, OUT_OF_WORK, FOUND, PRUNED, OPEN, CHANGED, STALE = 0, 1, 2, 3, 4, 5, 6
# Preference for pivots whose exclusion is costly; of 0 to 1, this visited fewest nodes.
COSTLY = 0.25


def doubt(stack: Stack) -> None:
    """Go on after a find that did not stand up: within round-off of the threshold."""
    counts = stack.counts[stack.cursor[LEVEL]]
    if counts[NEEDED] == 0:
        backtrack(stack)
    else:
        counts[NEGATIVE] = DOUBTFUL


@compiled
def advance(stack: Stack, work: int) -> int:
    """Search until something is found, all is seen, or so much more work is done."""
    cursor = stack.cursor
    cursor[LIMIT] = cursor[WORK] + work
    while cursor[LEVEL] >= 0:
        level = cursor[LEVEL]
        if level < cursor[HELD]:
            return STALE
        state = _settle(stack, level)
        if state in (FOUND, OUT_OF_WORK):
            return state
        cursor[NODES] += 1
        if state == OPEN:
            _descend(stack, level)
        else:
            backtrack(stack)
    return EXHAUSTED


@compiled
def backtrack(stack: Stack) -> None:
    """Leave the current level and exclude the pivot of the one above.

    And with it every candidate that equals it: a set that has one of them in place of
    the pivot is as good as one with the pivot, and those have been seen.
    """
    stack.cursor[LEVEL] -= 1
    level = stack.cursor[LEVEL]
    if level >= 0:
        pivot = stack.counts[level, PIVOT]
        kind = stack.kinds[stack.ids[level, pivot]]
        exclude(stack, level, pivot)
        for row in range(stack.counts[level, CANDIDATES] - 1, -1, -1):
            if stack.kinds[stack.ids[level, row]] == kind:
                exclude(stack, level, row)


@compiled
def _settle(stack: Stack, level: int) -> int:
    """Draw every conclusion at a level, in place; where work ends, go on from there."""
    counts = stack.counts[level]
    matrix, dual = schur(stack, level), inverse(stack, level)
    while True:
        if stack.cursor[WORK] >= stack.cursor[LIMIT]:
            return OUT_OF_WORK
        c = counts[CANDIDATES]
        slack = c - counts[NEEDED]
        if slack < 0 or counts[NEGATIVE] > slack:
            return PRUNED
        if counts[NEEDED] == 0:
            return FOUND
        spend(stack, 1, 0)
        row = lowest(matrix, c)
        if matrix[row, row] <= TINY:
            exclude(stack, level, row)
            continue
        if counts[UNCHECKED]:
            check_inverse(stack, level)
        if counts[NEGATIVE] == UNKNOWN and refresh(stack, level) > slack:
            return PRUNED
        negative = counts[NEGATIVE]
        if negative == 0:
            return FOUND
        if negative > 0:
            state = _settle_dual(stack, level)
            if state == CHANGED:
                continue
            if state != OPEN:
                return state
        spend(stack, 2, c)
        degrees, scores = conflicts(matrix, c)
        busiest = int(np.argmax(degrees))
        if degrees[busiest] > slack:
            exclude(stack, level, busiest)
            continue
        if degrees[busiest] > 0:
            spend(stack, 1, c)
            if matching_exceeds(matrix, c, degrees, slack):
                return PRUNED
            counts[PIVOT] = busiest
        else:
            if negative > 0:
                # To exclude these costs slack and takes no negative eigenvalue away.
                scores *= 1.0 + COSTLY * (np.diag(dual[:c, :c]) > 0)
            # Equal candidates first: excluding one excludes them all.
            kinds = stack.kinds[stack.ids[level, :c]]
            scores += (np.bincount(kinds)[kinds] > 1) * np.float64(c)
            counts[PIVOT] = np.argmax(scores)
        return OPEN


@compiled
def _settle_dual(stack: Stack, level: int) -> int:
    """Draw conclusions from V: PRUNED, FOUND, CHANGED or OPEN.

    A set R of `slack` candidates may go exactly if V_RR has `negative` negative
    eigenvalues, so `slack - negative` positive ones.
    """
    c, negative = stack.counts[level, CANDIDATES], stack.counts[level, NEGATIVE]
    slack = c - stack.counts[level, NEEDED]
    dual = inverse(stack, level)
    if negative == slack:
        row = highest(dual, c)
        if dual[row, row] >= TRUST:
            return _include_all(stack, level, np.diag(dual[:c, :c]) >= TRUST)
        if slack > 1 and dual[row, row] > -TRUST:
            return OPEN
        if slack == 1:
            row = lowest(dual, c)
            if dual[row, row] > -TRUST:
                return OPEN
            return _found_without(stack, level, row, row)
    elif negative < slack - 1:
        return OPEN
    # No positive eigenvalue: no indefinite pair. One of them: no positive definite
    # pair, so what goes with j where V_jj > 0 makes an indefinite pair with it.
    sign = 1.0 if negative == slack else -1.0
    spend(stack, 2, c)
    if slack == 2:
        j, k, pairs = find_pair(dual, c, sign)
        if pairs == SOME:
            return _found_without(stack, level, j, k)
        return PRUNED if pairs == NONE else OPEN
    alone = partners(dual, c, sign) < slack - 1
    if negative < slack:
        alone &= np.diag(dual[:c, :c]) >= TRUST
    return _include_all(stack, level, alone)


@compiled
def _found_without(stack: Stack, level: int, j: int, k: int) -> int:
    """Note one set of those that may do; the level stays, for the others."""
    stack.counts[level, WITHOUT] = j
    stack.counts[level, AND_WITHOUT] = k
    return FOUND


@compiled
def _include_all(stack: Stack, level: int, rows: NDArray[np.bool_]) -> int:
    """Include rows that must be in: PRUNED if they cannot, CHANGED, OPEN if none."""
    state = OPEN
    # From the last, because what takes the place of a row comes from behind it.
    for row in np.flatnonzero(rows)[::-1]:
        if schur(stack, level)[row, row] <= TINY:
            return PRUNED
        if stack.counts[level, NEEDED] == 0:
            return PRUNED
        include(stack, level, row)
        state = CHANGED
        if stack.cursor[WORK] >= stack.cursor[LIMIT]:
            break
    return state


@compiled
def _descend(stack: Stack, level: int) -> None:
    """Open the next level: the current one with its pivot included."""
    c = stack.counts[level, CANDIDATES]
    pivot = stack.counts[level, PIVOT]
    stack.ids[level + 1, :c] = stack.ids[level, :c]
    stack.counts[level + 1] = stack.counts[level]
    stack.counts[level + 1, WIDTH] = c
    schur(stack, level + 1)[:] = schur(stack, level)[:c, :c]
    inverse(stack, level + 1)[:] = inverse(stack, level)[:c, :c]
    spend(stack, 2, c)
    oldest = level + 2 - stack.memory.shape[1]
    stack.cursor[HELD] = max(stack.cursor[HELD], oldest)
    stack.cursor[LEVEL] = level + 1
    include(stack, level + 1, pivot)
