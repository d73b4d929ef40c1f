"""SMEA's search: improve a subset until none is better or the budget is spent."""

import math
import time
from dataclasses import dataclass, field

import numpy as np

from flwr_safedshb.aggregation.gram import FloatArray
from flwr_safedshb.aggregation.smea import kernel, levels
from flwr_safedshb.aggregation.smea.incumbent import (
    RESOLUTION,
    Subset,
    descend,
    lower_bound,
    shrink,
)
from flwr_safedshb.aggregation.smea.primitives import IntArray
from flwr_safedshb.aggregation.spectral import scatter_lambda

# Above so many vectors the stack would need gigabytes: start and bound only.
MAX_VECTORS = 256
# Nodes between two looks at the clock.
SLICE = 256
# After a stopped search, so many tries to prove a lower bound share this fraction more
# of its nodes.
PROOFS = 6
PROOF_SHARE = 0.25
# Below this fraction of the incumbent a bound is not worth proving.
WORTHLESS = 1 / 64


@dataclass
class Budget:
    """What may still be spent: nodes, and seconds by the clock if there is a limit."""

    nodes: int
    deadline: float | None

    def grant(self) -> int:
        """Return how many nodes may be visited next; 0 ends the search."""
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return 0
        return min(self.nodes, SLICE)


@dataclass
class Best:
    """The best subset so far and the top eigenvalue of its scatter."""

    distances: FloatArray = field(repr=False)
    subset: Subset
    value: float

    def offer(self, superset: Subset, target: float) -> bool:
        """Take the best of a set that claims to be below `target`; say if it is."""
        subset = shrink(self.distances, superset, len(self.subset))
        value = scatter_lambda(self.distances, subset)
        if not value < target:
            return False
        self.subset, self.value = descend(self.distances, subset, value)
        return True


def search(
    distances: FloatArray, m: int, max_nodes: int, time_limit: float | None
) -> tuple[Subset, float, float]:
    """Return m vectors with the smallest top eigenvalue of their scatter.

    Parameters
    ----------
    distances : (n, n) array
        Squared distances, obvious outliers first.
    m : int
        Size of the subset.
    max_nodes : int
        Budget of the search; a quarter more may go into proving a bound where it is
        not completed.
    time_limit : float or None
        Seconds, half of them for the search and half for a bound.

    Returns
    -------
    subset, value, bound
        Sorted; the top eigenvalue; and a proven lower bound on it for every subset,
        equal to `value` if the search was completed.
    """
    start = shrink(distances, np.arange(len(distances)), m)
    best = Best(distances, *descend(distances, start, scatter_lambda(distances, start)))
    bound = lower_bound(distances, m)
    if best.value * (1.0 - RESOLUTION) <= bound:
        return best.subset, best.value, best.value
    if len(distances) <= MAX_VECTORS:
        now = time.monotonic()
        halfway, end = (
            (None, None)
            if time_limit is None
            else (now + time_limit / 2, now + time_limit)
        )
        if improve(best, best.value, Budget(max_nodes, halfway)):
            return best.subset, best.value, best.value
        bound = _prove(best, bound, int(PROOF_SHARE * max_nodes), end)
    return best.subset, best.value, min(bound, best.value)


def _prove(best: Best, bound: float, nodes: int, deadline: float | None) -> float:
    """Raise a lower bound by deciding thresholds between it and the incumbent."""
    ceiling = best.value
    for _ in range(PROOFS):
        ceiling = min(ceiling, best.value)
        target = math.sqrt(max(bound, WORTHLESS * ceiling) * ceiling)
        if improve(best, target, Budget(nodes // PROOFS, deadline)):
            bound = max(bound, min(target, best.value * (1.0 - RESOLUTION)))
        else:
            ceiling = target
    return bound


def improve(best: Best, target: float, budget: Budget) -> bool:
    """Look for subsets below `target` and below the incumbent, which they replace.

    Returns
    -------
    bool
        True if the search was completed: then no subset is below `target`, or below
        the incumbent if that is smaller, up to `RESOLUTION`.
    """
    n, m = len(best.distances), len(best.subset)
    kinds = _kinds(best.distances)
    # Every subset has a first member, and it is one of the first n - m + 1; of equal
    # vectors, the first is enough.
    roots = [root for root in range(n - m + 1) if kinds[root] == root]
    return all(_improve_root(best, root, kinds, target, budget) for root in roots)


def _kinds(distances: FloatArray) -> IntArray:
    """Return for each vector the first one that equals it."""
    near = distances == 0.0
    for i, j in zip(*np.nonzero(np.triu(near, 1)), strict=True):
        # Round-off may hide a small distance that shows beside others.
        near[i, j] = np.allclose(distances[i], distances[j], rtol=1e-10, atol=0.0)
    first: IntArray = np.argmax(near, axis=0)
    return first


def _improve_root(
    best: Best, root: int, kinds: IntArray, target: float, budget: Budget
) -> bool:
    """Search the subsets whose first member is `root`."""
    m = len(best.subset)
    rest = np.arange(root + 1, len(best.distances))
    radii = best.distances[root, rest]
    gram = 0.5 * (radii[:, None] + radii - best.distances[np.ix_(rest, rest)])

    threshold = _threshold(best, target)
    stack = levels.new_stack(_matrix(gram, threshold), m - 1, kinds[rest])
    while True:
        before = int(stack.cursor[levels.NODES])
        state = kernel.advance(stack, budget.grant())
        budget.nodes -= int(stack.cursor[levels.NODES]) - before
        if state == kernel.EXHAUSTED:
            return True
        if state == kernel.OUT_OF_NODES:
            if budget.grant() == 0:
                return False
            continue
        members = np.append(root, rest[levels.found(stack)])
        if best.offer(members, threshold):
            threshold = _threshold(best, target)
            _rebuild(stack, _matrix(gram, threshold))
        else:
            kernel.doubt(stack)


def _threshold(best: Best, target: float) -> float:
    return min(target, best.value * (1.0 - RESOLUTION))


def _matrix(gram: FloatArray, threshold: float) -> FloatArray:
    return 1.0 + np.eye(len(gram)) - gram / threshold


def _rebuild(stack: levels.Stack, matrix: FloatArray) -> None:
    """Put the levels of a running search onto the matrix of a lower threshold."""
    for level in range(int(stack.cursor[levels.LEVEL]) + 1):
        counts = stack.counts[level]
        c = counts[levels.CANDIDATES]
        rows = stack.ids[level, :c]
        taken = stack.included[: counts[levels.INCLUDED]]
        counts[levels.NEGATIVE] = levels.UNKNOWN
        block = matrix[np.ix_(rows, rows)]
        if len(taken):
            inner = matrix[np.ix_(taken, taken)]
            if np.linalg.eigvalsh(inner)[0] <= levels.TINY:
                levels.close(stack, level)
                continue
            cross = matrix[np.ix_(taken, rows)]
            block = block - cross.T @ np.linalg.solve(inner, cross)
        stack.schur[level, :c, :c] = 0.5 * (block + block.T)
