"""Filter: shrink the weights of what sticks out along the top eigenvector.

Diakonikolas et al., Steinhardt et al.; listed in Allouah et al., ICML 2023, and here on
the Gram matrix. **The paper's listing has its test the wrong way round**: it returns
when the top eigenvalue is above eta sigma_0^2, which for sigma_0 = 0 would be the plain
mean at once. Its text and its proposition only make sense with "at most", which is what
is implemented.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh

from flwr_safedshb.aggregation.gram import FloatArray
from flwr_safedshb.aggregation.rule import (
    GramRule,
    Notion,
    Weighing,
    check_gram,
    single_threaded,
)
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

    Stops when the top eigenvalue s2 is at most e sigma_0^2, e = 2(n-f)/(n-2f), or
    before the mass sum_i c_i of the weights falls to `min_mass`; then it returns the
    mean with the smallest s2 that it saw. The paper's e is n/(n-2f) times larger, and
    so is its constant. With a valid sigma_0 the first test always comes first. With
    sigma_0 = 0 the second keeps it sane: run to the end (`min_mass=0`, the paper's
    experiments), all weight is left on one single vector.

    Formal guarantees, with proofs in `flwr_safedshb.theory.filtering`
    ------------------------------------------------------------------
    For every S of n - f vectors, lambda_S the top eigenvalue of their covariance:

    - with sigma_0^2 >= lambda_S: ||out - mean_S||^2 <= 3f/(n-2f) sigma_0^2;
    - with sigma_0 = 0, the default stop and f < n/3:
      ||out - mean_S||^2 <= f/(n-3f) (sqrt(2) + sqrt(e))^2 lambda_S;
    - without a bound and for any f: a constant of each answer's own, in its `Weighing`.

    For f >= n/3 what is left may be f colluders alone, whose equal vectors have s2 = 0.
    So there a mean counts only if it shares at least ((n-2f)/(n-f))^3 with every S;
    equal weights on n - f vectors share (n-2f)/(n-f). The more is asked for, the more
    often the best mean does not count: with the square in place of the cube ALIE gains.
    A larger `min_mass` would be no remedy at all: to drop f equal vectors far away
    takes the mass to n(n-2f)/(n-f) at once, less than f for n = 7, f = 3; stopped
    before that, the rule is the plain mean.

    Parameters
    ----------
    spectral_bound : float
        sigma_0^2, an upper bound on lambda_max of the honest vectors' covariance; 0 if
        none is known.
    min_mass : float, optional
        Default n - 2f, without a bound as described above. A given one is taken
        literally: the smallest s2 decides.
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

    @property
    def notion(self) -> Notion:
        """In units of `spectral_bound` where that is given."""
        return "spectral bound" if self.spectral_bound > 0.0 else "spectral"

    def kappa(self, n: int, f: int) -> float | None:
        """Return the constant in units of `spectral_bound`, or of the eigenvalue."""
        if self.spectral_bound > 0.0:
            return kappa_filter(n, f)
        proven = kappa_filter_agnostic(n, f)
        return proven if self.min_mass in (None, n - 2.0 * f) else None

    def paper_kappa(self, n: int, f: int) -> float | None:
        """Return the paper's constant, for a bound and its own larger stop."""
        constant = kappa_filter_paper(n, f)
        return constant if self.spectral_bound > 0.0 else None

    @single_threaded
    def weigh(self, gram: FloatArray, f: int) -> Weighing:
        """Return the weights at the stop."""
        gram = check_gram(gram, f)
        n = len(gram)
        min_mass = n - 2.0 * f if self.min_mass is None else self.min_mass
        stop = filter_eta(n, f) * self.spectral_bound
        shared = self._least_share(n, f)
        c, least, best = np.ones(n), np.inf, np.ones(n)
        # The smallest s2 of a mass above n - 2f: at most e lambda_S for every S.
        lowest, start = np.inf, None
        # Every turn takes at least one weight to zero.
        while True:
            value, projections, start = _top(gram, c, start)
            counts = shared == 0.0 or least_share(c, f) >= shared
            if counts and value < least:
                least, best = value, c
            if c.sum() > n - 2.0 * f or f == 0:
                lowest = min(lowest, value)
            if value <= stop:
                return self._weighing(best, least, lowest, f)
            squares = np.where(c > 0.0, projections**2, 0.0)
            # Equal vectors must go together: a remnant of one, left by round-off, would
            # stick out most in the next turn and shrink the others once more.
            shares = squares / squares.max()
            shrunk = np.where(shares < 1.0 - RESOLUTION, c * (1.0 - shares), 0.0)
            if shrunk.sum() <= min_mass:
                # Taken literally (min_mass 0), equal squares leave nothing: keep the
                # last mean.
                if min_mass == 0.0:
                    least, best = value, c
                return self._weighing(best, least, lowest, f)
            c = shrunk

    def _least_share(self, n: int, f: int) -> float:
        """Return what a mean must share with every S in order to count."""
        agnostic = self.min_mass is None and self.spectral_bound == 0.0
        return ((n - 2 * f) / (n - f)) ** 3 if agnostic and 3 * f >= n else 0.0

    def _weighing(self, c: FloatArray, value: float, lowest: float, f: int) -> Weighing:
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

    The filter that knows no bound: it goes on until the mass reaches n - 2f and returns
    the mean with the smallest top eigenvalue. For f < n/3 `Filter` does the same by
    default, and the same is proven.
    """

    notion: ClassVar[Notion] = "spectral"

    def kappa(self, n: int, f: int) -> float | None:
        """Return the constant of `Filter` without a bound; None for f >= n/3."""
        return kappa_filter_agnostic(n, f)

    def weigh(self, gram: FloatArray, f: int) -> Weighing:
        """Return the weights with the smallest top eigenvalue."""
        gram = check_gram(gram, f)
        return Filter(min_mass=len(gram) - 2.0 * f).weigh(gram, f)


def least_share(c: FloatArray, f: int) -> float:
    """Return what weights share, at least, with equal ones on any n - f vectors.

    That is the smallest sum over S of min(c_i / sum(c), 1/(n-f)): without the f largest
    terms.

    Parameters
    ----------
    c : (n,) array
        At least 0, not all of them 0.
    f : int
    """
    size = len(c) - f
    return float(np.sort(np.minimum(c / c.sum(), 1.0 / size))[:size].sum())


def _top(
    gram: FloatArray, c: FloatArray, start: FloatArray | None
) -> tuple[float, FloatArray, FloatArray]:
    """Return the top of the covariance of vectors with weights c.

    Returns
    -------
    value : float
        Largest eigenvalue, 0 where it is within the round-off of the Gram matrix.
    projections : (n,) array
        Of the vectors about their mean on the eigenvector, up to a common factor.
    vector : (n,) array
        Where to start next time.
    """
    n = len(c)
    share = c / c.sum()
    roots = np.sqrt(share)

    def about_mean(x: FloatArray) -> FloatArray:
        # The centred Gram matrix times x, without forming it.
        product = gram @ (x - share * x.sum())
        moved: FloatArray = product - share @ product
        return moved

    pair = None
    if n > DENSE:
        # The roots themselves are an eigenvector of eigenvalue 0: start elsewhere.
        first = roots * np.cos(np.arange(n)) if start is None else start
        operator = LinearOperator(
            (n, n), matvec=lambda x: roots * about_mean(roots * x), dtype=float
        )
        # The generator is for restarts only: fixed, so that equal input stays equal.
        fixed = np.random.default_rng(0)
        with suppress(ArpackError):
            pair = eigsh(operator, k=1, which="LA", v0=first, rng=fixed)
    if pair is None:
        along = gram @ share
        matrix = gram - along[:, None] - along[None, :] + share @ along
        pair = np.linalg.eigh(roots[:, None] * matrix * roots[None, :])
    value, vector = float(pair[0][-1]), pair[1][:, -1]
    round_off = 8 * n * np.finfo(float).eps * float(share @ np.diag(gram))
    return (value if value > round_off else 0.0), about_mean(roots * vector), vector
