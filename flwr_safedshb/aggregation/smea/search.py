"""SMEA's search: improve a subset until none is better or the budget is spent."""

import math
from collections.abc import Callable

import numpy as np

from flwr_safedshb.aggregation.gram import RESOLUTION, Subset, scatter_lambda
from flwr_safedshb.aggregation.rule import FloatArray
from flwr_safedshb.aggregation.smea import kernel
from flwr_safedshb.aggregation.smea import search_state as stacks
from flwr_safedshb.aggregation.smea.budget import SLICE, Budget
from flwr_safedshb.aggregation.smea.certificate import (
    game_bound,
    quick_bound,
    within_reach,
)
from flwr_safedshb.aggregation.smea.incumbent import Best, start
from flwr_safedshb.aggregation.smea.root_cases import Root, Spectrum, roots, spectrum

# How much of the budget is spent when the start ends, and the search; the rest goes
# into tries to prove a lower bound.
START, SEARCH = 0.2, 0.8
PROOFS = 6
# Below this fraction of the incumbent a bound is not worth proving.
WORTHLESS = 1 / 64


def search(
    distances: FloatArray, m: int, budget: Budget
) -> tuple[Subset, float, float]:
    """Return m vectors with the smallest top eigenvalue of their scatter.

    Parameters
    ----------
    distances : (n, n) array
        Squared distances, obvious outliers first.
    m : int
        Size of the subset.
    budget : Budget

    Returns
    -------
    subset, value, bound
        Sorted; the top eigenvalue; and a proven lower bound on it for every subset,
        equal to `value` if the search was completed.
    """
    budget.share = START
    first = start(distances, m, budget)
    near = np.flatnonzero(within_reach(distances, m, first.value))
    if len(near) == m:
        value = scatter_lambda(distances, near)
        return near, value, value
    best = Best(
        distances[np.ix_(near, near)], np.searchsorted(near, first.subset), first.value
    )
    bound = _search(best, budget)
    return near[best.subset], best.value, min(bound, best.value)


def _search(best: Best, budget: Budget) -> float:
    """Improve the incumbent; return a lower bound on every subset's value."""
    whole = spectrum(best.distances, budget)
    bound = quick_bound(whole, best.distances, len(best.subset))
    if best.value * (1.0 - RESOLUTION) <= bound:
        return best.value
    budget.share = SEARCH
    if improve(best, whole, best.value, budget):
        return best.value
    bound = max(bound, game_bound(whole, best.subset, budget))
    ceiling = best.value
    for proof in range(PROOFS):
        budget.share = SEARCH + (1.0 - SEARCH) * (proof + 1) / PROOFS
        ceiling = min(ceiling, best.value)
        target = math.sqrt(max(bound, WORTHLESS * ceiling) * ceiling)
        if improve(best, whole, target, budget):
            bound = max(bound, min(target, best.value * (1.0 - RESOLUTION)))
        else:
            ceiling = target
    return bound


def improve(best: Best, whole: Spectrum, target: float, budget: Budget) -> bool:
    """Look for subsets below `target` and below the incumbent, which they replace.

    Returns
    -------
    bool
        True if the search was completed: then no subset is below `target`, or below
        the incumbent if that is smaller, up to `RESOLUTION`.
    """
    m = len(best.subset)

    def threshold() -> float:
        return min(target, best.value * (1.0 - RESOLUTION))

    return all(
        _improve_root(best, root, threshold, budget)
        for root in roots(best.distances, whole, m, threshold, budget)
    )


def _improve_root(
    best: Best, root: Root, threshold: Callable[[], float], budget: Budget
) -> bool:
    """Search the subsets of one root; say if that was completed."""
    stack = root.stack(best.distances, len(best.subset))
    while work := min(budget.left(), SLICE):
        before = stack.cursor.copy()
        state = kernel.advance(stack, work)
        if state == kernel.STALE:
            stacks.restore(stack)
        done = stack.cursor - before
        budget.spend(int(done[stacks.WORK]))
        budget.nodes += int(done[stacks.NODES])
        if state == kernel.EXHAUSTED:
            return True
        if state == kernel.FOUND:
            members = np.append(root.anchor, root.rest[stacks.found(stack)])
            if best.offer(members, threshold(), budget):
                stacks.lower(stack, root.matrix(best.distances, threshold()))
            else:
                kernel.doubt(stack)
    return False
