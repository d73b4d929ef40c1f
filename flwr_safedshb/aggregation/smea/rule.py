"""SMEA: the mean of the n - f vectors whose covariance has the smallest top eigenvalue.

Allouah et al., "On the Privacy-Robustness-Utility Trilemma in Distributed Learning",
ICML 2023. The paper's cost is O(C(n, f) d^3); here the subset is found exactly by
branch and bound on the Gram matrix (`search`), and an answer of a search that is
stopped early has a certificate of how far from the best it can be.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import ClassVar

import numpy as np

from flwr_safedshb.aggregation.gram import (
    GramRule,
    check_gram,
    check_grams,
    single_threaded,
)
from flwr_safedshb.aggregation.rule import FloatArray, KappaKind, Weighing
from flwr_safedshb.aggregation.scatter import (
    RESOLUTION,
    Subset,
    scatter_gram,
    scatter_lambda,
    sort_by_isolation,
    squared_distances,
)
from flwr_safedshb.theory import kappa_smea, kappa_smea_paper

# Up to so many subsets it is faster to look at all of them.
ENUMERATED = 250


@dataclass(frozen=True)
class SMEA(GramRule):
    """Smallest Maximum Eigenvalue Averaging, exact to a relative 1e-9.

    Adversaries can make any exact search exponential, so it has a budget. Past it,
    the answer is the best subset found; `weigh` then certifies it with a proven lower
    bound on the smallest eigenvalue and the kappa that follows from the gap.

    Parameters
    ----------
    max_nodes : int
        Budget: the work of so many nodes of a search over 100 vectors, some seconds by
        default. A node over more vectors counts for what it costs, and so does all else
        that takes long, so no number of vectors and nothing that adversaries send
        makes a call take much longer. Work is counted, not time: the answer is a
        function of the input alone.
    time_limit : float, optional
        Seconds after which the search stops, too; the answer then depends on the
        machine.
    """

    max_nodes: int = 400_000
    time_limit: float | None = None

    kappa_kind: ClassVar[KappaKind] = "spectral"

    def __post_init__(self) -> None:
        if self.max_nodes < 0:
            raise ValueError(f"max_nodes={self.max_nodes} must be at least 0")
        if self.time_limit is not None and not self.time_limit >= 0:
            raise ValueError(f"time_limit={self.time_limit} must be at least 0 seconds")

    def kappa(self, n: int, f: int) -> float:
        """Return 4f/(n-2f), the constant of an exact answer."""
        return kappa_smea(n, f)

    paper_kappa = staticmethod(kappa_smea_paper)

    @single_threaded
    def weigh(self, gram: FloatArray, f: int) -> Weighing:
        """Return the subset of size n - f with the smallest top eigenvalue."""
        gram = check_gram(gram, f)
        n, m = len(gram), len(gram) - f
        if f == 0:
            subset = np.arange(n)
            smallest = bound = scatter_lambda(squared_distances(gram), subset)
        else:
            # Search in an order that does not depend on the order of the clients.
            distances, order = sort_by_isolation(gram, m)
            chosen, smallest, bound = self._find_subset(distances, m)
            subset = np.sort(order[chosen])
        gap = smallest / bound - 1.0 if bound > 0.0 else math.inf
        return Weighing(
            weights=np.bincount(subset, minlength=n) / m,
            subset=subset,
            lambda_max=smallest / m,
            lower_bound=bound / m,
            kappa=kappa_smea(n, f, gap if smallest > 0.0 else 0.0),
        )

    @single_threaded
    def weigh_many(self, grams: FloatArray, f: int) -> FloatArray:
        """Return the weights, (g, n), for each Gram matrix."""
        g, n = len(grams), grams.shape[-1]
        if f == 0 or g == 0 or math.comb(n, f) > ENUMERATED:
            return super().weigh_many(grams, f)
        distances, orders = sort_by_isolation(check_grams(grams, f), n - f)
        subsets, _ = _enumerate_subsets(distances, n - f)
        weights = np.zeros((g, n))
        chosen = np.take_along_axis(orders, subsets, axis=1)
        np.put_along_axis(weights, chosen, 1.0 / (n - f), axis=1)
        return weights

    def _find_subset(
        self, distances: FloatArray, m: int
    ) -> tuple[Subset, float, float]:
        """Return the subset, the top eigenvalue of its scatter, and a lower bound."""
        if math.comb(len(distances), m) <= ENUMERATED:
            subsets, values = _enumerate_subsets(distances[None], m)
            return subsets[0], float(values[0]), float(values[0])
        # Compiling takes time, and small federations never need the search.
        from flwr_safedshb.aggregation.smea.budget import NODE, WorkBudget
        from flwr_safedshb.aggregation.smea.search import find_best_subset

        budget = WorkBudget(self.max_nodes * NODE, self.time_limit)
        return find_best_subset(distances, m, budget)


def _enumerate_subsets(distances: FloatArray, m: int) -> tuple[Subset, FloatArray]:
    """Return the best of all subsets, (m,) each; the first of those that tie.

    Parameters
    ----------
    distances : (g, n, n) array

    Returns
    -------
    subsets : (g, m) array
    values : (g,) array
        Largest eigenvalue of the scatter of each.
    """
    g, n = distances.shape[:2]
    subsets, places = _list_subsets(n, m)
    blocks = np.take(distances.reshape(g, n * n), places, axis=1)
    scatters = scatter_gram(blocks.reshape(g, len(subsets), m, m))
    lowest, highest = _eigenvalue_bounds(scatters)
    within = 1.0 + 2 * RESOLUTION  # what ties with the best is looked at, too
    open_ = lowest <= within * highest.min(axis=1, keepdims=True)
    # Bounds cross where round-off is as large as the distances; then look at all.
    open_ |= (lowest > within * highest).any(axis=1, keepdims=True)
    values = np.full(open_.shape, np.inf)
    values[open_] = np.linalg.eigvalsh(scatters[open_])[..., -1]
    smallest = values.min(axis=1, keepdims=True)
    first = np.argmax(values <= smallest + RESOLUTION * np.abs(smallest), axis=1)
    found = np.take_along_axis(values, first[:, None], axis=1)[:, 0]
    return subsets[first], np.maximum(found, 0.0)


def _eigenvalue_bounds(scatters: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return bounds on the top eigenvalues of scatters, (..., m, m), from their traces.

    With t the sum and q the sum of squares of the m - 1 eigenvalues that are not zero
    by centring: q <= lambda t for the largest, and lambda is at most sqrt(m - 2)
    deviations above their mean (Wolkowicz and Styan, 1980).
    """
    rank = max(scatters.shape[-1] - 1, 1)
    total = np.trace(scatters, axis1=-2, axis2=-1)
    scale = total.max(axis=-1, keepdims=True)
    scale = np.where(scale > 0.0, scale, 1.0)
    scaled = scatters / scale[..., None, None]
    squares = np.einsum("...ij,...ij->...", scaled, scaled)
    mean = total / (scale * rank)
    spread = np.sqrt(np.maximum(squares / rank - mean * mean, 0.0))
    # The difference above may have lost all but the last bits of the mean.
    highest = mean + np.sqrt(rank - 1.0) * (spread + 1e-7 * mean)
    exact = squares > 1e-280  # or the squares have underflowed
    lowest = np.divide(squares, mean * rank, out=np.zeros_like(mean), where=exact)
    return scale * lowest, np.where(exact, scale * highest, total)


@lru_cache(maxsize=32)
def _list_subsets(n: int, m: int) -> tuple[Subset, Subset]:
    """Return all subsets, (s, m), and the flat indices of their (m, m) blocks."""
    subsets = np.array(list(combinations(range(n), m)), dtype=np.intp)
    return subsets, (n * subsets[:, :, None] + subsets[:, None, :]).reshape(-1)
