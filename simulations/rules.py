"""The min-max point: nearest to the means of all sets of n - f vectors at once.

It minimises the largest |z - mean_S|^2 / lambda_S over all sets S of n - f vectors,
lambda_S the top eigenvalue of the covariance of S: the smallest t for which the balls
about the means with squared radii t lambda_S have a point in common. docs/robustness.md
has the proof that t is at most 2f/(n-2f), half of SMEA's constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.aggregation.gram import (
    GramRule,
    check_gram,
    check_grams,
    single_threaded,
)
from flwr_safedshb.aggregation.rule import FloatArray, KappaKind, Weighing
from flwr_safedshb.aggregation.scatter import (
    Subset,
    scatter_gram,
    squared_distances,
    weighted_lambda,
)
from flwr_safedshb.aggregation.smea.kernels import compile_kernel
from flwr_safedshb.theory import kappa_lower_bound

# All sets are looked at, and a matrix has their number squared.
MOST_SETS = 1000
# By how much the largest ratio at the answer may exceed the proven smallest one, in
# units of the eigenvalue, or of the mean's square where a set is far away.
TOLERANCE = 1e-11
_STEPS = 100


@dataclass(frozen=True)
class MinMaxPoint(GramRule):
    """The point whose largest |z - mean_S|^2 / lambda_S over all sets is smallest."""

    kappa_kind: ClassVar[KappaKind] = "spectral"

    def kappa(self, n: int, f: int) -> float:
        """Return 2f/(n-2f)."""
        return 2.0 * kappa_lower_bound(n, f)

    def weigh(self, gram: FloatArray, f: int) -> Weighing:
        """Return the weights of the point, and its own ratio as kappa."""
        gram = check_gram(gram, f)
        weights, ratios = self._solve(gram[None], f)
        top = weighted_lambda(gram, weights[0])
        return Weighing(weights[0], None, top, kappa=float(ratios[0]))

    def weigh_many(self, grams: FloatArray, f: int) -> FloatArray:
        """Return the weights for each Gram matrix."""
        return self._solve(check_grams(grams, f), f)[0]

    @single_threaded
    def _solve(self, grams: FloatArray, f: int) -> tuple[FloatArray, FloatArray]:
        """Return weights, (g, n), and the largest ratios, (g,)."""
        g, n = grams.shape[:2]
        rows, places = _sets(n, n - f)
        distances = squared_distances(grams)
        blocks = np.take(distances.reshape(g, n * n), places, axis=1)
        scatters = scatter_gram(blocks.reshape(g, len(rows), n - f, n - f))
        tops = np.maximum(np.linalg.eigvalsh(scatters)[..., -1], 0.0) / (n - f)
        # About the mean of the set that is closest together: far vectors of others
        # must not blur it.
        least = tops.argmin(axis=1)
        weights = rows[least].copy()
        ratios = np.zeros(g)
        for k, first in enumerate(least):
            smallest = tops[k, first]
            if smallest == 0.0:
                continue  # equal vectors: nothing else is within any multiple of it
            apart = rows - rows[first]
            products = -0.5 * (apart @ distances[k] @ apart.T)
            share, ratios[k] = smallest_ratio(
                products / smallest, tops[k] / smallest, int(first)
            )
            weights[k] = share @ rows
        return weights, ratios


@compile_kernel
def smallest_ratio(
    products: FloatArray, tops: FloatArray, first: int
) -> tuple[FloatArray, float]:
    """Return the weights mu of the means, (k,), that make the point, and its ratio.

    By Lagrange's dual, t = max over mu of (sum mu_i |c_i|^2 - |z|^2) / (sum mu_i
    lambda_i) with z = sum mu_i c_i: every mu proves a lower bound on t, and the ratios
    at z are an upper one. An active set of means, and Newton's method for t, until both
    agree.

    Parameters
    ----------
    products : (k, k) array
        Inner products of the means c_i.
    tops : (k,) array
        The eigenvalues lambda_i, the smallest of them 1.
    first : int
        The set that has it.
    """
    mu = np.zeros(len(tops))
    mu[first] = 1.0
    active = mu > 0.0
    squares = np.diag(products).copy()
    best, ratio = mu, np.inf
    for _ in range(_STEPS):
        along = products @ mu
        length = along @ mu
        away = squares - 2.0 * along + length
        if (away / tops).max() < ratio:
            best, ratio = mu, (away / tops).max()
        t = (mu @ squares - length) / (mu @ tops)
        outside = (away - t * tops) / (tops + squares)
        worst = int(np.argmax(outside))
        if outside[worst] <= TOLERANCE:
            break
        active[worst] = True
        mu = _best_of(products, squares - t * tops, mu, active)
    return best, ratio


@compile_kernel
def _best_of(
    products: FloatArray, linear: FloatArray, mu: FloatArray, active: NDArray[np.bool_]
) -> FloatArray:
    """Maximise mu linear - mu products mu over weights of the active means."""
    mu = mu.copy()
    while True:
        some = np.flatnonzero(active)
        k = len(some)
        matrix = np.ones((k + 1, k + 1))
        matrix[k, k] = 0.0
        right = np.zeros(k + 1)
        for i in range(k):
            right[i] = linear[some[i]]
            for j in range(k):
                matrix[i, j] = 2.0 * products[some[i], some[j]]
                right[i] -= matrix[i, j] * mu[some[j]]
            # Means that depend on each other: far along, and to the edge below.
            matrix[i, i] += 1e-12 * (1.0 + products[some[i], some[i]])
        move = np.linalg.solve(matrix, right)
        share, edge = 1.0, -1
        for i in range(k):
            if mu[some[i]] + share * move[i] < 0.0:
                share, edge = -mu[some[i]] / move[i], i
        for i in range(k):
            mu[some[i]] = max(0.0, mu[some[i]] + share * move[i])
        if edge < 0:
            mu /= mu.sum()
            return mu
        mu[some[edge]] = 0.0
        active[some[edge]] = False


@lru_cache(maxsize=8)
def _sets(n: int, m: int) -> tuple[FloatArray, Subset]:
    """Return the weights of all means, and where the sets' blocks are, flat."""
    if (count := math.comb(n, m)) > MOST_SETS:
        raise ValueError(
            f"n={n}, f={n - m} have {count} sets of {m} vectors, and the min-max point "
            f"looks at up to {MOST_SETS}; use SMEA, or fewer clients"
        )
    sets = np.array(list(combinations(range(n), m)), dtype=np.intp)
    rows = np.zeros((len(sets), n))
    np.put_along_axis(rows, sets, 1.0 / m, axis=1)
    return rows, (n * sets[:, :, None] + sets[:, None, :]).reshape(-1)
