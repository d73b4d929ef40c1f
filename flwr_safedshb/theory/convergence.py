r"""The convergence theorem: its schedules, the bounds that the paper proves, and ours.

Assumptions: the average L of the honest clients' losses is L-smooth; every example's
gradient has a norm of at most C, so that clipping changes nothing, and a variance of at
most sigma^2 about its client's; the rule is (f, kappa)-robust averaging in the spectral
sense; gamma_t and beta_t are those of the schedule. No loss on all of R^d is strongly
convex with bounded gradients. Here weight decay supplies the convexity: it is added
after clipping and noise and is the same for all clients, and only the rest is bounded.

**Strong convexity is not needed**: both proofs use the PL inequality
(1/2) ||grad L||^2 >= mu (L - L*) alone, as the paper remarks, so they cover some losses
that are not convex. docs/convergence.md proves our constants.
"""

import math
from dataclasses import dataclass

from flwr_safedshb.theory.checks import check_not_negative, check_positive

# The theorem's numbers; 24 ties the momentum to the learning rate.
A1, A2, A3, A4 = 240.0, 480.0, 5760.0, 270.0
MOMENTUM_FACTOR = 24.0


@dataclass(frozen=True)
class StronglyConvex:
    """The theorem's schedule for a mu-strongly convex L, or one that is mu-PL.

    gamma_t = 10/(mu (t + a1 L/mu)), beta_t = 1 - 24 L gamma_t. beta_0 is 0, and beta_t
    tends to 1.
    """

    smoothness: float
    strong_convexity: float

    def __post_init__(self) -> None:
        _check_convexity(self.smoothness, self.strong_convexity)

    def learning_rate(self, step: int) -> float:
        """Return gamma_t."""
        mu = self.strong_convexity
        return 10.0 / (mu * step + A1 * self.smoothness)

    def momentum(self, step: int) -> float:
        """Return beta_t."""
        return _couple_momentum(self.smoothness, self.learning_rate(step))


@dataclass(frozen=True)
class NonConvex:
    """The theorem's schedule without convexity: constants that depend on T.

    gamma = min{1/(24 L), sqrt(a4 L0)/(2 sbar sqrt(a3 L T))}, beta = 1 - 24 L gamma. Its
    bound holds for an iterate drawn uniformly (``output="uniform"``).

    Parameters
    ----------
    smoothness : float
        L.
    initial_gap : float
        L0 = L(theta_0) - inf L, or a bound on it.
    effective_std : float
        sbar, the root of `effective_variance`.
    steps : int
        T.
    """

    smoothness: float
    initial_gap: float
    effective_std: float
    steps: int

    def __post_init__(self) -> None:
        check_positive(
            smoothness=self.smoothness, initial_gap=self.initial_gap, steps=self.steps
        )
        check_not_negative(effective_std=self.effective_std)

    @property
    def learning_rate(self) -> float:
        """Return gamma."""
        largest = 1.0 / (MOMENTUM_FACTOR * self.smoothness)
        if self.effective_std == 0.0:
            return largest
        scale = 2.0 * self.effective_std * math.sqrt(A3 * self.smoothness * self.steps)
        return min(largest, math.sqrt(A4 * self.initial_gap) / scale)

    @property
    def momentum(self) -> float:
        """Return beta."""
        return _couple_momentum(self.smoothness, self.learning_rate)


def _couple_momentum(smoothness: float, learning_rate: float) -> float:
    """Return 1 - 24 L gamma, kept from rounding below 0 at gamma = 1/(24 L)."""
    return max(0.0, 1.0 - MOMENTUM_FACTOR * smoothness * learning_rate)


@dataclass(frozen=True)
class Bound:
    """An upper bound as the sum of three causes.

    Attributes
    ----------
    heterogeneity : float
        What adversaries gain from honest clients that differ; no T removes it.
    noise : float
        Sampling and privacy noise, and what adversaries gain from them.
    start : float
        The distance of the first model.
    """

    heterogeneity: float
    noise: float
    start: float

    @property
    def total(self) -> float:
        """Return the bound itself."""
        return self.heterogeneity + self.noise + self.start


def strongly_convex_bound(
    smoothness: float,
    strong_convexity: float,
    kappa: float,
    heterogeneity: float,
    effective_variance: float,
    initial_gap: float,
    steps: int,
) -> Bound:
    """Bound E[L(theta_T) - L*] under `StronglyConvex`, with our constants.

    2.3 kappa Gcov^2/mu + 302 L sbar^2/(mu^2 T') + L0 (a1 L/(mu T'))^10 with
    T' = T + a1 L/mu, a1 = 240: same schedule and assumptions as the paper's, and no
    term is larger. Proof: docs/convergence.md. The first momentums are the first
    gradients; the paper's m_0 = 0 makes the last term (1 + 2/23) times as large.
    """
    late = _shift_steps(smoothness, strong_convexity, steps)
    _check_terms(kappa, heterogeneity, effective_variance, initial_gap)
    mu = strong_convexity
    return Bound(
        heterogeneity=2.3 * kappa * heterogeneity**2 / mu,
        noise=302.0 * smoothness * effective_variance / (mu**2 * late),
        start=initial_gap * (A1 * smoothness / (mu * late)) ** 10,
    )


def strongly_convex_bound_paper(
    smoothness: float,
    strong_convexity: float,
    kappa: float,
    heterogeneity: float,
    effective_variance: float,
    initial_gap: float,
    steps: int,
) -> Bound:
    """Bound E[L(theta_T) - L*] under `StronglyConvex` as the paper's proof does.

    4 a1 kappa Gcov^2/mu + 2 a1^2 L sbar^2/(mu^2 T') + a1^2 L^2 L0/(mu^2 T'^2) with
    T' = T + a1 L/mu. **The theorem is printed with T in place of T'** and with twice
    the last term, which is weaker. sbar^2 is `effective_variance_paper`.
    """
    late = _shift_steps(smoothness, strong_convexity, steps)
    _check_terms(kappa, heterogeneity, effective_variance, initial_gap)
    square = strong_convexity**2
    return Bound(
        heterogeneity=4.0 * A1 * kappa * heterogeneity**2 / strong_convexity,
        noise=2.0 * A1**2 * smoothness * effective_variance / (square * late),
        start=A1**2 * smoothness**2 * initial_gap / (square * late**2),
    )


def non_convex_bound(
    smoothness: float,
    kappa: float,
    heterogeneity: float,
    effective_variance: float,
    initial_gap: float,
    steps: int,
) -> Bound:
    """Bound E||grad L||^2 at a uniform iterate under `NonConvex`, with our constants.

    4 r kappa Gcov^2 + (20.1 + 5.2 r) sqrt(L L0) sbar/sqrt(T) + 52 L L0/T, r = 1 + 1/T:
    same schedule and assumptions as the paper's, smaller constants. Proof:
    docs/convergence.md.
    """
    _check_terms(kappa, heterogeneity, effective_variance, initial_gap)
    check_positive(smoothness=smoothness, steps=steps)
    scale, more = smoothness * initial_gap, 1.0 + 1.0 / steps
    root = math.sqrt(scale * effective_variance / steps)
    return Bound(
        heterogeneity=4.0 * more * kappa * heterogeneity**2,
        noise=(20.1 + 5.2 * more) * root,
        start=52.0 * scale / steps,
    )


def non_convex_bound_paper(
    smoothness: float,
    kappa: float,
    heterogeneity: float,
    effective_variance: float,
    initial_gap: float,
    steps: int,
) -> Bound:
    """Bound E||grad L||^2 at a uniform iterate under `NonConvex`: the paper's theorem.

    a2 kappa Gcov^2 + sqrt(a3 a4 L L0) sbar/sqrt(T) + a4 L L0/T. sbar^2 is
    `effective_variance_paper`.
    """
    _check_terms(kappa, heterogeneity, effective_variance, initial_gap)
    check_positive(smoothness=smoothness, steps=steps)
    scale = smoothness * initial_gap
    return Bound(
        heterogeneity=A2 * kappa * heterogeneity**2,
        noise=math.sqrt(A3 * A4 * scale * effective_variance / steps),
        start=A4 * scale / steps,
    )


def _shift_steps(smoothness: float, strong_convexity: float, steps: int) -> float:
    """Return T' = T + a1 L/mu."""
    _check_convexity(smoothness, strong_convexity)
    check_positive(steps=steps)
    return steps + A1 * smoothness / strong_convexity


def _check_convexity(smoothness: float, strong_convexity: float) -> None:
    check_positive(smoothness=smoothness, strong_convexity=strong_convexity)
    if strong_convexity > smoothness:
        raise ValueError(
            f"strong_convexity={strong_convexity} must be at most smoothness="
            f"{smoothness}: no function is more convex than it is smooth"
        )


def _check_terms(
    kappa: float, heterogeneity: float, effective_variance: float, initial_gap: float
) -> None:
    check_not_negative(
        kappa=kappa,
        heterogeneity=heterogeneity,
        effective_variance=effective_variance,
        initial_gap=initial_gap,
    )
