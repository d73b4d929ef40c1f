"""MDA: the mean of the n - f vectors with the smallest diameter.

A subset has a diameter of at most t exactly if the vectors left out cover every pair
that is farther apart than t. So MDA is a vertex cover of size f for a threshold, and
bisection over the distances that occur finds the smallest one.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.aggregation.baselines import subset_mean
from flwr_safedshb.aggregation.gram import GramRule, check_gram
from flwr_safedshb.aggregation.rule import FloatArray, Weighing
from flwr_safedshb.aggregation.scatter import sort_by_isolation


@dataclass(frozen=True)
class MDA(GramRule):
    """Minimum Diameter Averaging (El-Mhamdi et al., 2018), exact within its budget.

    Many subsets share the smallest diameter. If fewer than f vectors need to go, those
    farthest from their n - f nearest go, too.

    Parameters
    ----------
    max_nodes : int
        Budget for each threshold, in nodes of the search: hostile vectors can make any
        exact search exponential. A threshold undecided within it counts as too small.
    """

    max_nodes: int = 100_000

    def weigh(self, gram: FloatArray, f: int) -> Weighing:
        """Return equal weights on n - f vectors."""
        gram = check_gram(gram, f)
        n = len(gram)
        ordered, order = sort_by_isolation(gram, n - f)
        thresholds = np.unique(ordered)
        low, high = 0, len(thresholds) - 1
        out: set[int] = set()
        while low < high:
            middle = (low + high) // 2
            cover = _find_cover(ordered > thresholds[middle], f, self.max_nodes)
            if cover is None:
                low = middle + 1
            else:
                high, out = middle, cover
        free = [i for i in range(n) if i not in out][: f - len(out)]
        kept = np.setdiff1d(np.arange(n), [*out, *free])
        return subset_mean(gram, order[kept])


def _find_cover(far: NDArray[np.bool_], size: int, max_nodes: int) -> set[int] | None:
    """Return at most `size` vertices that touch every edge, or None.

    Parameters
    ----------
    far : (n, n) boolean array
        The edges.
    """
    # Sets of vertices are the bits of an integer.
    edges = [sum(1 << int(k) for k in np.flatnonzero(row)) for row in far]
    alive = (1 << len(edges)) - 1
    stack = [(alive, 0)]
    for _ in range(max_nodes):
        if not stack:
            return None
        alive, cover = stack.pop()
        left = size - cover.bit_count()
        degrees = [(edges[j] & alive).bit_count() for j in _list_bits(alive)]
        most = max(degrees, default=0)
        if most == 0:
            return set(_list_bits(cover))
        # So many vertices of at most this degree touch no more edges than that.
        if 2 * left * most < sum(degrees):
            continue
        pivot = _list_bits(alive)[degrees.index(most)]
        around = edges[pivot] & alive
        # Either all neighbours are in the cover, tried last, or the vertex is.
        if most <= left:
            stack.append((alive & ~around & ~(1 << pivot), cover | around))
        if left > 0:
            stack.append((alive & ~(1 << pivot), cover | (1 << pivot)))
    return None


def _list_bits(mask: int) -> list[int]:
    return [j for j in range(mask.bit_length()) if mask >> j & 1]
