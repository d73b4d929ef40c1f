"""Filter: shrink the weights of vectors that stick out along the top eigenvector.

Diakonikolas et al., Steinhardt et al.; listed in Allouah et al., ICML 2023, and here on
the Gram matrix. **The paper's listing has its test the wrong way round**: it returns
when the top eigenvalue is above eta sigma_0^2, which for sigma_0 = 0 is the plain mean
at once. Its text and its proposition only make sense with "at most", as implemented.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh

from flwr_safedshb.aggregation.gram import (
    GramRule,
    check_gram,
    check_grams,
    scale_by_power,
    single_threaded,
)
from flwr_safedshb.aggregation.rule import FloatArray, KappaKind, Weighing
from flwr_safedshb.theory import (
    filter_certificate,
    filter_eta,
    kappa_filter,
    kappa_filter_agnostic,
    kappa_filter_paper,
)

# Projections whose squares differ by less than this factor are equal.
RESOLUTION = 1e-9
# Up to so many vectors a full decomposition is faster than an iteration.
DENSE = 128


@dataclass(frozen=True)
class Filter(GramRule):
    r"""Iterative down-weighting along the top eigenvector of the covariance.

    The loop stops when the top eigenvalue s2 is at most e sigma_0^2, e = 2(n-f)/(n-2f),
    or before the mass sum_i c_i of the weights falls to `min_mass`, and returns the
    mean with the smallest s2 that it saw. The paper's e is n/(n-2f) times larger, and
    so is its constant. With a valid sigma_0 the first test always comes first. With
    sigma_0 = 0 the second is needed: run to the end (`min_mass=0`, the paper's
    experiments), all weight is left on a single vector.

    Formal guarantees, with proofs in `flwr_safedshb.theory.filtering`
    ------------------------------------------------------------------
    For every S of n - f vectors, lambda_S the top eigenvalue of their covariance:

    - with sigma_0^2 >= lambda_S: ||out - mean_S||^2 <= 3f/(n-2f) sigma_0^2;
    - with sigma_0 = 0, the default stop and f < n/3:
      ||out - mean_S||^2 <= f/(n-3f) (sqrt(2) + sqrt(e))^2 lambda_S;
    - without a bound and for any f: a constant of each answer's own, in its `Weighing`.

    For f >= n/3 the last vectors may be those of f colluders, equal and so with s2 = 0.
    So there a mean counts only if its weights overlap by at least ((n-2f)/(n-f))^3 with
    equal weights on every S; those on any n - f vectors overlap by (n-2f)/(n-f). With
    the square in place of the cube, ALIE gains. A larger `min_mass` is no remedy: to
    drop f equal vectors far away takes the mass to n(n-2f)/(n-f) at once, less than f
    for n = 7, f = 3; stopped before that, the rule is the plain mean.

    Parameters
    ----------
    spectral_bound : float
        sigma_0^2, an upper bound on lambda_max of the honest vectors' covariance; 0 if
        none is known.
    min_mass : float, optional
        Default n - 2f, and the overlap above. A given one is taken literally: the
        smallest s2 decides.
    """

    spectral_bound: float = 0.0
    min_mass: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.spectral_bound < np.inf:
            raise ValueError(
                f"spectral_bound={self.spectral_bound} must be finite and at least 0"
            )
        if self.min_mass is not None and not 0.0 <= self.min_mass < np.inf:
            raise ValueError(f"min_mass={self.min_mass} must be finite and at least 0")

    def change_unit(self, exponent: int) -> Self:
        """Return the rule for vectors in another unit; a bound stays above 0."""
        if self.spectral_bound == 0.0:
            return self
        bound = float(scale_by_power(self.spectral_bound, 2 * exponent))
        return replace(self, spectral_bound=max(bound, np.finfo(float).tiny))

    @property
    def kappa_kind(self) -> KappaKind:
        """Return "spectral bound" if there is one, else "spectral"."""
        return "spectral bound" if self.spectral_bound > 0.0 else "spectral"

    def kappa(self, n: int, f: int) -> float | None:
        """Return the constant in units of `spectral_bound`, or of the eigenvalue."""
        if self.spectral_bound > 0.0:
            return kappa_filter(n, f)
        proven = kappa_filter_agnostic(n, f)
        return proven if self.min_mass in (None, n - 2.0 * f) else None

    def paper_kappa(self, n: int, f: int) -> float | None:
        """Return the paper's constant, for a bound and the paper's larger stop."""
        constant = kappa_filter_paper(n, f)
        return constant if self.spectral_bound > 0.0 else None

    @single_threaded
    def weigh(self, gram: FloatArray, f: int) -> Weighing:
        """Return the weights at the stop."""
        gram = check_gram(gram, f)
        c, least, lowest = self._shrink_weights(gram[None], f)
        return self._certify(c[0], float(least[0]), float(lowest[0]), f)

    @single_threaded
    def weigh_many(self, grams: FloatArray, f: int) -> FloatArray:
        """Return the weights, (g, n), for each Gram matrix, computed side by side."""
        c, _, _ = self._shrink_weights(check_grams(grams, f), f)
        weights: FloatArray = c / c.sum(axis=1, keepdims=True)
        return weights

    def _shrink_weights(
        self, grams: FloatArray, f: int
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Shrink the weights for each of g Gram matrices, (g, n, n), to the stop.

        Returns
        -------
        best : (g, n) array
            The weights of the answer.
        least : (g,) array
            Its s2.
        lowest : (g,) array
            The smallest s2 of a mass above n - 2f: at most e lambda_S for every S.
        """
        g, n = grams.shape[:2]
        min_mass = n - 2.0 * f if self.min_mass is None else self.min_mass
        stop = filter_eta(n, f) * self.spectral_bound
        required = self._required_overlap(n, f)
        best, least, lowest = np.ones((g, n)), np.full(g, np.inf), np.full(g, np.inf)
        # The matrices that have not stopped, and their weights.
        open_, c, start = np.arange(g), np.ones((g, n)), None
        # Every turn takes at least one weight to zero.
        while len(open_):
            values, projections, start = _top_eigenpairs(grams, c, start)
            better = values < least[open_]
            if required:
                better &= min_overlap(c, f) >= required
            least[open_[better]], best[open_[better]] = values[better], c[better]
            massive = (c.sum(axis=1) > n - 2.0 * f) | (f == 0)
            lowest[open_[massive]] = np.minimum(lowest[open_], values)[massive]
            sizes = np.where(c > 0.0, np.abs(projections), 0.0)
            largest = sizes.max(axis=1, keepdims=True)
            # Shares of the largest: squares of tiny projections may underflow.
            shares = np.divide(sizes, largest, out=np.ones_like(c), where=largest > 0.0)
            shares **= 2
            # Equal vectors must go together: a remnant of one, left by round-off, would
            # stick out most in the next turn and shrink the others once more. Where
            # all are equal, none is left.
            shrunk = np.where(shares < 1.0 - RESOLUTION, c * (1.0 - shares), 0.0)
            small = shrunk.sum(axis=1) <= min_mass
            if min_mass == 0.0:
                # Taken literally, equal squares leave nothing: keep the last mean.
                last = small & (values > stop)
                least[open_[last]], best[open_[last]] = values[last], c[last]
            on = (values > stop) & ~small
            open_, grams, c = open_[on], grams[on], shrunk[on]
            start = None if start is None else start[on]
        return best, least, lowest

    def _required_overlap(self, n: int, f: int) -> float:
        """Return the overlap that a mean must have with every S in order to count."""
        agnostic = self.min_mass is None and self.spectral_bound == 0.0
        return ((n - 2 * f) / (n - f)) ** 3 if agnostic and 3 * f >= n else 0.0

    def _certify(self, c: FloatArray, value: float, lowest: float, f: int) -> Weighing:
        """Return the answer of weights c, (n,), with its proven kappa."""
        n = len(c)
        if self.spectral_bound > 0.0:
            # With a valid bound its own stop comes first: past it nothing is proven.
            held = value <= filter_eta(n, f) * self.spectral_bound
            kappa = kappa_filter(n, f) if held else np.inf
        elif value <= lowest:
            kappa = filter_certificate(c, f)
        else:
            gap = value / lowest - 1.0 if lowest > 0.0 else np.inf
            kappa = filter_certificate(c, f, gap)
        return Weighing(c / c.sum(), subset=None, lambda_max=value, kappa=kappa)


@dataclass(frozen=True)
class CAF(GramRule):
    """Covariance-bound Agnostic Filter (Allouah, Guerraoui, Stephan, 2025).

    `Filter` without a bound and without a test of overlap: it goes on until the mass
    reaches n - 2f and returns the mean with the smallest top eigenvalue. For f < n/3
    that is `Filter()`, with the same proof.
    """

    kappa_kind: ClassVar[KappaKind] = "spectral"

    def kappa(self, n: int, f: int) -> float | None:
        """Return the constant of `Filter` without a bound; None for f >= n/3."""
        return kappa_filter_agnostic(n, f)

    def weigh(self, gram: FloatArray, f: int) -> Weighing:
        """Return the weights with the smallest top eigenvalue."""
        gram = check_gram(gram, f)
        return Filter(min_mass=len(gram) - 2.0 * f).weigh(gram, f)


def min_overlap(c: FloatArray, f: int) -> FloatArray:
    """Return the least overlap of weights with equal ones on n - f vectors, (g,).

    The overlap with S is the sum over S of min(c_i / sum(c), 1/(n-f)), and the least is
    the sum without the f largest terms.

    Parameters
    ----------
    c : (g, n) array
        At least 0, not all of a row 0.
    f : int
    """
    size = c.shape[1] - f
    shares = np.minimum(c / c.sum(axis=1, keepdims=True), 1.0 / size)
    least: FloatArray = np.sort(shares, axis=1)[:, :size].sum(axis=1)
    return least


def _top_eigenpairs(
    grams: FloatArray, c: FloatArray, starts: FloatArray | None
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the top eigenpairs of the covariances under weights c, (g, n).

    Returns
    -------
    values : (g,) array
        Largest eigenvalues, 0 where within the round-off of the Gram matrix.
    projections : (g, n) array
        Of the vectors about their mean on the eigenvector, up to a common factor.
    vectors : (g, n) array
        Eigenvectors, to start from next time.
    """
    n = c.shape[1]
    share = c / c.sum(axis=1, keepdims=True)
    roots = np.sqrt(share)
    if n > DENSE:
        # The roots themselves are an eigenvector of eigenvalue 0: start elsewhere.
        starts = roots * np.cos(np.arange(n)) if starts is None else starts
        pairs = [*map(_iterate_lanczos, grams, share, roots, starts)]
        values = np.array([value for value, _ in pairs])
        vectors = np.array([vector for _, vector in pairs])
    else:
        values, vectors = _decompose_dense(grams, share, roots)
    diagonals = np.diagonal(grams, axis1=1, axis2=2)
    round_off = 8 * n * np.finfo(float).eps * (share * diagonals).sum(axis=1)
    values = np.where(values > round_off, values, 0.0)
    return values, _apply_centred(grams, share, roots * vectors), vectors


def _decompose_dense(
    grams: FloatArray, share: FloatArray, roots: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the top eigenvalues, (g,), and eigenvectors, (g, n), by LAPACK."""
    along = (grams @ share[:, :, None])[:, :, 0]
    centred = grams - along[:, :, None] - along[:, None, :]
    centred += (share * along).sum(axis=1)[:, None, None]
    values, vectors = np.linalg.eigh(roots[:, :, None] * centred * roots[:, None, :])
    return values[:, -1], vectors[:, :, -1]


def _iterate_lanczos(
    gram: FloatArray, share: FloatArray, roots: FloatArray, start: FloatArray
) -> tuple[float, FloatArray]:
    """Return both by ARPACK for one large matrix, whose centred form is never made."""
    size = len(gram)

    def apply_operator(x: FloatArray) -> FloatArray:
        moved: FloatArray = roots * _apply_centred(gram, share, roots * x)
        return moved

    operator = LinearOperator((size, size), matvec=apply_operator, dtype=float)
    # The generator is for restarts only: fixed, so that equal input stays equal.
    fixed = np.random.default_rng(0)
    with suppress(ArpackError):
        values, vectors = eigsh(operator, k=1, which="LA", v0=start, rng=fixed)
        return float(values[-1]), vectors[:, -1]
    values, vectors = _decompose_dense(gram[None], share[None], roots[None])
    return float(values[0]), vectors[0]


def _apply_centred(grams: FloatArray, share: FloatArray, x: FloatArray) -> FloatArray:
    """Return the products of centred Gram matrices with x, (..., n)."""
    moved = (grams @ (x - share * x.sum(axis=-1, keepdims=True))[..., None])[..., 0]
    about: FloatArray = moved - (share * moved).sum(axis=-1, keepdims=True)
    return about
