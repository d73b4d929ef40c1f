r"""How Safe-DSHB converges: the paper's theorem, as its proof has it, and sharper.

What it assumes: the average L of the honest clients' losses is L-smooth; the gradient
of every example has a norm of at most C, so that clipping does nothing, and a variance
of at most sigma^2 about its client's; the rule is (f, kappa)-robust averaging in the
spectral sense; and gamma_t and beta_t are those of the schedule. No loss is strongly
convex on all of R^d and has bounded gradients: weight decay, which is added after
clipping and noise and is the same for all clients, supplies the convexity here, and
the bound is on the gradients of the rest.

**Strong convexity is not needed**: both proofs use the PL inequality
(1/2) ||grad L||^2 >= mu (L - L*) alone, as the paper remarks, so that they cover some
losses that are not convex. The proof of our constants is in docs/convergence.md.
"""

import math
from dataclasses import dataclass

from flwr_safedshb.theory.checks import not_negative, positive
from flwr_safedshb.theory.schedules import A1, A2, A3, A4, check_convexity


@dataclass(frozen=True)
class Bound:
    """An upper bound by where it comes from; the sum of the three.

    Attributes
    ----------
    heterogeneity : float
        What adversaries gain from honest clients that differ; no T removes it.
    noise : float
        Of sampling and of privacy, and what adversaries gain from them.
    start : float
        How far away the first model was.
    """

    heterogeneity: float
    noise: float
    start: float

    @property
    def total(self) -> float:
        """The bound itself."""
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
    """Bound E[L(theta_T) - L*] under `StronglyConvex`; ours.

    2.3 kappa Gcov^2/mu + 302 L sbar^2/(mu^2 T') + L0 (a1 L/(mu T'))^10 with
    T' = T + a1 L/mu, a1 = 240: same schedule and assumptions as the paper's, and no
    term is larger. Proof: docs/convergence.md. It is for runs that start as ours do,
    with the first gradients for momentums; with the paper's m_0 = 0 the last term is
    (1 + 2/23) times as large.

    Parameters
    ----------
    smoothness, strong_convexity : float
        L and mu, of strong convexity or of the PL inequality.
    kappa : float
        Spectral constant of the rule.
    heterogeneity : float
        Gcov: Gcov^2 is the largest eigenvalue of the covariance of the honest clients'
        gradients, over all models; G, of the trace, is no smaller.
    effective_variance : float
        sbar^2 of `effective_variance`.
    initial_gap : float
        L0 = L(theta_0) - L*.
    steps : int
        T.
    """
    late = _late(smoothness, strong_convexity, steps)
    _check(kappa, heterogeneity, effective_variance, initial_gap)
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
    T' = T + a1 L/mu. **The theorem is printed with T in place of T'**, and with twice
    the last term, which is weaker.
    Parameters as in `strongly_convex_bound`; sbar^2 is `effective_variance_paper`.
    """
    late = _late(smoothness, strong_convexity, steps)
    _check(kappa, heterogeneity, effective_variance, initial_gap)
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
    """Bound E||grad L||^2 at a uniform iterate under `NonConvex`; ours.

    4 r kappa Gcov^2 + (20.1 + 5.2 r) sqrt(L L0) sbar/sqrt(T) + 52 L L0/T, r = 1 + 1/T:
    same schedule and assumptions as the paper's, smaller constants. Proof:
    docs/convergence.md. Parameters as in `strongly_convex_bound`.
    """
    _check(kappa, heterogeneity, effective_variance, initial_gap)
    positive(smoothness=smoothness, steps=steps)
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
    """Bound E||grad L||^2 at a uniform iterate under `NonConvex`; the paper's theorem.

    a2 kappa Gcov^2 + sqrt(a3 a4 L L0) sbar/sqrt(T) + a4 L L0/T; parameters as in
    `strongly_convex_bound`, sbar^2 is `effective_variance_paper`.
    """
    _check(kappa, heterogeneity, effective_variance, initial_gap)
    positive(smoothness=smoothness, steps=steps)
    scale = smoothness * initial_gap
    return Bound(
        heterogeneity=A2 * kappa * heterogeneity**2,
        noise=math.sqrt(A3 * A4 * scale * effective_variance / steps),
        start=A4 * scale / steps,
    )


def _late(smoothness: float, strong_convexity: float, steps: int) -> float:
    """Return T + a1 L/mu."""
    check_convexity(smoothness, strong_convexity)
    positive(steps=steps)
    return steps + A1 * smoothness / strong_convexity


def _check(
    kappa: float, heterogeneity: float, effective_variance: float, initial_gap: float
) -> None:
    not_negative(
        kappa=kappa,
        heterogeneity=heterogeneity,
        effective_variance=effective_variance,
        initial_gap=initial_gap,
    )
