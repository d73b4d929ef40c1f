r"""The root cases of SMEA's search: every subset is searched at its first member.

`branch_and_bound` needs one vector that is in the subset, the anchor. The first vector
is the anchor or not in the subset; then the second is, and so on, f + 1 times at most.
What can be said before there is an anchor follows from the scatter of the vectors that
are left. With K = I + D/(2t), D their squared distances, a subset S is below the
threshold t exactly if z^T K_S z > 0 for every z != 0 of sum zero. On such z, K is
I - scatter/t, so from the eigenvectors u_k of the scatter, of eigenvalues l_k,

    V = sum_k u_k u_k^T / (1 - l_k/t) - 1 1^T/n

is its inverse, and its negative eigenvalues are as many as there are l_k > t. Excluding
j, V becomes its Schur complement at j, one pass; anchored at a, M^-1 is V without row
and column a. So all root cases of a threshold share one decomposition.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from flwr_safedshb.aggregation.rule import FloatArray
from flwr_safedshb.aggregation.scatter import Subset, scatter_gram
from flwr_safedshb.aggregation.smea import search_state as st
from flwr_safedshb.aggregation.smea.budget import DECOMPOSITION, WorkBudget
from flwr_safedshb.aggregation.smea.kernels import IntArray


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


def decompose_scatter(distances: FloatArray, budget: WorkBudget) -> Spectrum:
    """Decompose the scatter of vectors with the given squared distances, (n, n)."""
    budget.spend_passes(DECOMPOSITION, len(distances))
    return Spectrum(*np.linalg.eigh(scatter_gram(distances)))


@dataclass(frozen=True)
class ScatterInverse:
    """What is known of all vectors that are left, for one threshold.

    Attributes
    ----------
    threshold : float
    certain : int
        Negative eigenvalues of K on sums of zero, at least.
    matrix : (n, n) array or None
        V, where its signs can be trusted; then `certain` is exact.
    """

    threshold: float
    certain: int
    matrix: FloatArray | None

    def exclude_row(self, row: int, block: FloatArray) -> "ScatterInverse | None":
        """Exclude a vector; return None if round-off is too large to go on with V.

        Parameters
        ----------
        row : int
        block : (n - 1, n - 1) array
            Squared distances of the others.
        """
        if self.matrix is None:
            return None
        pivot = np.delete(self.matrix[row], row)
        size = float(self.matrix[row, row])
        if abs(size) < st.TRUST or np.square(pivot).max() / abs(size) > st.GROWTH:
            return None
        rest = np.delete(np.delete(self.matrix, row, axis=0), row, axis=1)
        rest -= np.outer(pivot / size, pivot)
        # One row of V K: the identity's but for a constant, which sums of zero miss.
        product = rest[0] + rest[0] @ block / (2.0 * self.threshold)
        product[0] -= 1.0
        if not max(abs(rest[0].sum()), np.ptp(product)) <= st.DRIFT:
            return None
        return ScatterInverse(self.threshold, self.certain - int(size < 0.0), rest)


@dataclass(frozen=True)
class RootCase:
    """The subsets of one anchor and others of `rest`.

    Attributes
    ----------
    anchor : int
    rest : (c,) index array
    groups : (c,) array
        See `SearchState.groups`.
    known : ScatterInverse
    row : int
        Of the anchor in `known`.
    """

    anchor: int
    rest: Subset
    groups: IntArray
    known: ScatterInverse
    row: int

    def new_search(self, distances: FloatArray, m: int) -> st.SearchState:
        """Return the search for m vectors, which starts with what is known."""
        matrix = self.decision_matrix(distances, self.known.threshold)
        search = st.new_search(matrix, m - 1, self.groups)
        if self.known.matrix is not None:
            dual = np.delete(self.known.matrix, self.row, axis=0)
            st.inverse_at(search, 0)[:] = np.delete(dual, self.row, axis=1)
            search.counts[0, st.NEGATIVE] = self.known.certain
            search.counts[0, st.UNCHECKED] = 1
        return search

    def decision_matrix(self, distances: FloatArray, threshold: float) -> FloatArray:
        """Return M, (c, c), on `rest`."""
        radii = distances[self.anchor, self.rest]
        gram = 0.5 * (radii[:, None] + radii - distances[np.ix_(self.rest, self.rest)])
        matrix: FloatArray = 1.0 + np.eye(len(gram)) - gram / threshold
        return matrix


def generate_root_cases(
    distances: FloatArray,
    spectrum: Spectrum,
    m: int,
    threshold: Callable[[], float],
    budget: WorkBudget,
) -> Iterator[RootCase]:
    """Yield root cases until no subset below the threshold can be left.

    Parameters
    ----------
    distances : (n, n) array
    spectrum : Spectrum
        Of all vectors.
    m : int
    threshold : callable
        The threshold, which falls when the search of a root case finds something.
    budget : WorkBudget
        The cost is noted; whoever asks for the next root case checks what remains.
    """
    groups = group_equal_vectors(distances)
    alive = np.arange(len(distances))
    known: ScatterInverse | None = None
    while len(alive) >= m:
        if known is None or known.threshold != threshold():
            if len(alive) < len(distances):
                block = distances[np.ix_(alive, alive)]
                spectrum = decompose_scatter(block, budget)
            known = _invert_scatter(spectrum, threshold())
        slack = len(alive) - m
        if known.certain > slack:
            return
        row, is_last = _choose_anchor(known, slack)
        rest = np.delete(alive, row)
        yield RootCase(int(alive[row]), rest, groups[rest], known, row)
        budget.spend_passes(16, len(alive))
        if is_last:
            return
        # With it go its equals: what has one of them was as good with the anchor.
        group = groups[alive[row]]
        while len(gone := np.flatnonzero(groups[alive] == group)):
            alive = np.delete(alive, gone[-1])
            if known is not None:
                budget.spend_passes(8, len(alive))
                block = distances[np.ix_(alive, alive)]
                known = known.exclude_row(int(gone[-1]), block)


def _invert_scatter(spectrum: Spectrum, threshold: float) -> ScatterInverse:
    """Return V of all vectors, without its matrix where K is nearly singular."""
    factors = 1.0 - spectrum.values / threshold
    scale = max(1.0, float(np.abs(factors).max()))
    certain = int((factors < -st.TINY * scale).sum())
    if not np.abs(factors).min() > st.TRUST * scale:
        return ScatterInverse(threshold, certain, None)
    dual = (spectrum.vectors / factors) @ spectrum.vectors.T - 1.0 / len(factors)
    return ScatterInverse(threshold, certain, dual)


def _choose_anchor(known: ScatterInverse, slack: int) -> tuple[int, bool]:
    """Return the row of the next anchor, and whether it is the last one needed.

    Where all that go must take a negative eigenvalue away, V_jj >= 0 keeps j in.
    """
    if known.matrix is not None and known.certain == slack:
        diagonal = np.diag(known.matrix)
        row = int(np.argmax(diagonal))
        if diagonal[row] >= st.TRUST:
            return row, True
    return 0, False


def group_equal_vectors(distances: FloatArray) -> IntArray:
    """Return for each vector the first one that equals it, (n,)."""
    n = len(distances)
    groups = np.arange(n, dtype=np.int64)
    totals = distances.sum(axis=1)
    for i in range(n):
        if groups[i] != i:
            continue
        near = (distances[i] == 0.0) & (groups > i) & (groups == np.arange(n))
        # Round-off may hide a small distance that shows beside others.
        near &= np.abs(totals - totals[i]) <= 1e-9 * totals[i]
        for j in np.flatnonzero(near):
            difference = np.abs(distances[i] - distances[j])
            if (difference <= 1e-10 * np.abs(distances[j])).all():
                groups[j] = i
    return groups
