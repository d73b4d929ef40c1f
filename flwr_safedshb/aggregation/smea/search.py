"""SMEA's search: improve a subset until none is better or the budget is spent."""

import math
from collections.abc import Callable

import numpy as np

from flwr_safedshb.aggregation.rule import FloatArray
from flwr_safedshb.aggregation.scatter import (
    RESOLUTION,
    Subset,
    scatter_lambda,
)
from flwr_safedshb.aggregation.smea import branch_and_bound as bnb
from flwr_safedshb.aggregation.smea import search_state as st
from flwr_safedshb.aggregation.smea.budget import SLICE, WorkBudget
from flwr_safedshb.aggregation.smea.certificate import (
    find_reachable,
    game_bound,
    quick_bound,
)
from flwr_safedshb.aggregation.smea.incumbent import Incumbent, find_incumbent
from flwr_safedshb.aggregation.smea.root_cases import (
    RootCase,
    Spectrum,
    decompose_scatter,
    generate_root_cases,
)

# How much of the budget is spent when the incumbent is found, and when the search ends;
# the rest goes into tries to prove a lower bound.
START, SEARCH = 0.2, 0.8
PROOFS = 6
# Below this fraction of the incumbent a bound is not worth proving.
WORTHLESS = 1 / 64


def find_best_subset(
    distances: FloatArray, m: int, budget: WorkBudget
) -> tuple[Subset, float, float]:
    """Return m vectors with the smallest top eigenvalue of their scatter.

    Parameters
    ----------
    distances : (n, n) array
        Squared distances, obvious outliers first.
    m : int
        Size of the subset.
    budget : WorkBudget

    Returns
    -------
    subset, value, bound
        Sorted; the top eigenvalue; and a proven lower bound on it for every subset,
        equal to `value` if the search was completed.
    """
    budget.share = START
    first = find_incumbent(distances, m, budget)
    near = np.flatnonzero(find_reachable(distances, m, first.value))
    if len(near) == m:
        value = scatter_lambda(distances, near)
        return near, value, value
    best = Incumbent(
        distances[np.ix_(near, near)], np.searchsorted(near, first.subset), first.value
    )
    bound = _search_and_bound(best, budget)
    return near[best.subset], best.value, min(bound, best.value)


def _search_and_bound(best: Incumbent, budget: WorkBudget) -> float:
    """Improve the incumbent; return a lower bound on every subset's value."""
    spectrum = decompose_scatter(best.distances, budget)
    bound = quick_bound(spectrum, best.distances, len(best.subset))
    if best.value * (1.0 - RESOLUTION) <= bound:
        return best.value
    budget.share = SEARCH
    if improve_incumbent(best, spectrum, best.value, budget):
        return best.value
    bound = max(bound, game_bound(spectrum, best.subset, budget))
    ceiling = best.value
    for proof in range(PROOFS):
        budget.share = SEARCH + (1.0 - SEARCH) * (proof + 1) / PROOFS
        ceiling = min(ceiling, best.value)
        target = math.sqrt(max(bound, WORTHLESS * ceiling) * ceiling)
        if improve_incumbent(best, spectrum, target, budget):
            bound = max(bound, min(target, best.value * (1.0 - RESOLUTION)))
        else:
            ceiling = target
    return bound


def improve_incumbent(
    best: Incumbent, spectrum: Spectrum, target: float, budget: WorkBudget
) -> bool:
    """Replace the incumbent by subsets below it and below `target`.

    Returns
    -------
    bool
        True if the search was completed: then no subset is below `target`, or below
        the incumbent if that is smaller, up to `RESOLUTION`.
    """
    m = len(best.subset)

    def current_threshold() -> float:
        return min(target, best.value * (1.0 - RESOLUTION))

    return all(
        _search_root_case(best, root, current_threshold, budget)
        for root in generate_root_cases(
            best.distances, spectrum, m, current_threshold, budget
        )
    )


def _search_root_case(
    best: Incumbent,
    root: RootCase,
    threshold: Callable[[], float],
    budget: WorkBudget,
) -> bool:
    """Search the subsets of one root case; return True if that was completed."""
    search = root.new_search(best.distances, len(best.subset))
    while work := min(budget.remaining_work(), SLICE):
        before = search.cursor.copy()
        verdict = bnb.advance_search(search, work)
        if verdict == bnb.STALE:
            st.restore_level(search)
        done = search.cursor - before
        budget.spent += int(done[st.WORK])
        budget.nodes += int(done[st.NODES])
        if verdict == bnb.EXHAUSTED:
            return True
        if verdict == bnb.SOLVED:
            members = np.append(root.anchor, root.rest[st.solution_rows(search)])
            if best.try_superset(members, threshold(), budget):
                matrix = root.decision_matrix(best.distances, threshold())
                st.lower_threshold(search, matrix)
            else:
                bnb.reject_solution(search)
    return False
