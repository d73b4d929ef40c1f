r"""The roots of SMEA's search: every subset has a first member, and is searched there.

`kernel` needs one vector that is in the subset, the anchor. The first vector is it, or
it is not in the subset at all; then the second is, and so on, f + 1 times at most. What
can be said before there is an anchor follows from the scatter of the vectors that are
not excluded yet. With K = I + D/(2t), D their squared distances, a subset S is below
the threshold t exactly if z^T K_S z > 0 for every z != 0 of sum zero. On such z, K is
I - scatter/t, so from the eigenvectors u_k of the scatter, of eigenvalues l_k,

    V = sum_k u_k u_k^T / (1 - l_k/t) - 1 1^T/n

is its inverse, and its negative eigenvalues are as many as there are l_k > t. Excluding
j, V becomes its Schur complement at j, one pass; anchored at a, M^-1 is V without row
and column a. So all roots of a threshold share one decomposition.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from flwr_safedshb.aggregation.gram import Subset, scatter_gram
from flwr_safedshb.aggregation.rule import FloatArray
from flwr_safedshb.aggregation.smea.budget import DECOMPOSITION, Budget, passes
from flwr_safedshb.aggregation.smea.loops import IntArray
from flwr_safedshb.aggregation.smea.search_state import (
    DRIFT,
    GROWTH,
    NEGATIVE,
    TINY,
    TRUST,
    UNCHECKED,
    Stack,
    inverse,
    new_stack,
)


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues, increasing, and eigenvectors of the scatter of some vectors."""

    values: FloatArray
    vectors: FloatArray

    @property
    def noise(self) -> float:
        """Round-off of the eigenvalues."""
        eps = float(np.finfo(float).eps)
        return 4 * len(self.values) * eps * float(np.abs(self.values).max())


def spectrum(distances: FloatArray, budget: Budget) -> Spectrum:
    """Decompose the scatter of vectors with the given squared distances, (n, n)."""
    budget.spend(passes(DECOMPOSITION, len(distances)))
    return Spectrum(*np.linalg.eigh(scatter_gram(distances)))


@dataclass
class View:
    """What is known of all vectors that are left, for one threshold.

    Attributes
    ----------
    threshold : float
    certain : int
        Negative eigenvalues of K on sums of zero, at least.
    inverse : (n, n) array or None
        V, where its signs can be trusted; then `certain` is exact.
    """

    threshold: float
    certain: int
    inverse: FloatArray | None

    def without(self, row: int, block: FloatArray) -> "View | None":
        """Exclude a vector; None if round-off has grown too large to go on with V.

        Parameters
        ----------
        row : int
        block : (n - 1, n - 1) array
            Squared distances of the others.
        """
        if self.inverse is None:
            return None
        pivot = np.delete(self.inverse[row], row)
        size = float(self.inverse[row, row])
        if abs(size) < TRUST or np.square(pivot).max() / abs(size) > GROWTH:
            return None
        rest = np.delete(np.delete(self.inverse, row, axis=0), row, axis=1)
        rest -= np.outer(pivot / size, pivot)
        # One row of V K: the identity's but for a constant, which sums of zero miss.
        product = rest[0] + rest[0] @ block / (2.0 * self.threshold)
        product[0] -= 1.0
        if not max(abs(rest[0].sum()), np.ptp(product)) <= DRIFT:
            return None
        return View(self.threshold, self.certain - int(size < 0.0), rest)


@dataclass(frozen=True)
class Root:
    """Subsets that have one vector, the anchor, and others of `rest`.

    Attributes
    ----------
    anchor : int
    rest : index array
    kinds : (c,) array
        See `Stack.kinds`.
    view : View
    row : int
        Of the anchor in the view.
    """

    anchor: int
    rest: Subset
    kinds: IntArray
    view: View
    row: int

    def stack(self, distances: FloatArray, m: int) -> Stack:
        """Return the search at this root, with what is known from before."""
        matrix = self.matrix(distances, self.view.threshold)
        stack = new_stack(matrix, m - 1, self.kinds)
        if self.view.inverse is not None:
            dual = np.delete(self.view.inverse, self.row, axis=0)
            inverse(stack, 0)[:] = np.delete(dual, self.row, axis=1)
            stack.counts[0, NEGATIVE] = self.view.certain
            stack.counts[0, UNCHECKED] = 1
        return stack

    def matrix(self, distances: FloatArray, threshold: float) -> FloatArray:
        """Return M, (c, c), on `rest`."""
        radii = distances[self.anchor, self.rest]
        gram = 0.5 * (radii[:, None] + radii - distances[np.ix_(self.rest, self.rest)])
        matrix: FloatArray = 1.0 + np.eye(len(gram)) - gram / threshold
        return matrix


def roots(
    distances: FloatArray,
    whole: Spectrum,
    m: int,
    threshold: Callable[[], float],
    budget: Budget,
) -> Iterator[Root]:
    """Yield roots until no subset below the threshold can be left.

    Parameters
    ----------
    distances : (n, n) array
    whole : Spectrum
        Of all vectors.
    m : int
    threshold : callable
        The threshold, which falls when a root has found something.
    budget : Budget
        What roots cost is noted; who asks for the next one has looked.
    """
    kinds = equal_kinds(distances)
    alive = np.arange(len(distances))
    view: View | None = None
    while len(alive) >= m:
        if view is None or view.threshold != threshold():
            if len(alive) < len(distances):
                whole = spectrum(distances[np.ix_(alive, alive)], budget)
            view = _view(whole, threshold())
        slack = len(alive) - m
        if view.certain > slack:
            return
        row, only = _anchor(view, slack)
        rest = np.delete(alive, row)
        yield Root(int(alive[row]), rest, kinds[rest], view, row)
        budget.spend(passes(16, len(alive)))
        if only:
            return
        # With it go its equals: what has one of them was as good with the anchor.
        kind = kinds[alive[row]]
        while len(gone := np.flatnonzero(kinds[alive] == kind)):
            alive = np.delete(alive, gone[-1])
            if view is not None:
                budget.spend(passes(8, len(alive)))
                view = view.without(int(gone[-1]), distances[np.ix_(alive, alive)])


def _view(of: Spectrum, threshold: float) -> View:
    factors = 1.0 - of.values / threshold
    scale = max(1.0, float(np.abs(factors).max()))
    certain = int((factors < -TINY * scale).sum())
    if not np.abs(factors).min() > TRUST * scale:
        return View(threshold, certain, None)
    dual = (of.vectors / factors) @ of.vectors.T - 1.0 / len(factors)
    return View(threshold, certain, dual)


def _anchor(view: View, slack: int) -> tuple[int, bool]:
    """Return the row of the next anchor, and whether no other is needed.

    Where all that go must take a negative eigenvalue away, V_jj >= 0 keeps j in.
    """
    if view.inverse is not None and view.certain == slack:
        diagonal = np.diag(view.inverse)
        row = int(np.argmax(diagonal))
        if diagonal[row] >= TRUST:
            return row, True
    return 0, False


def equal_kinds(distances: FloatArray) -> IntArray:
    """Return for each vector the first one that equals it."""
    n = len(distances)
    kinds = np.arange(n, dtype=np.int64)
    totals = distances.sum(axis=1)
    for i in range(n):
        if kinds[i] != i:
            continue
        near = (distances[i] == 0.0) & (kinds > i) & (kinds == np.arange(n))
        # Round-off may hide a small distance that shows beside others.
        near &= np.abs(totals - totals[i]) <= 1e-9 * totals[i]
        for j in np.flatnonzero(near):
            if _alike(distances[i], distances[j]):
                kinds[j] = i
    return kinds


def _alike(one: FloatArray, other: FloatArray) -> bool:
    return bool((np.abs(one - other) <= 1e-10 * np.abs(other)).all())
