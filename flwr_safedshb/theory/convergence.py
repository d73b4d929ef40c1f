"""How Safe-DSHB converges: schedules and bounds of the paper's convergence theorem.

What it assumes: the average L of the honest clients' losses is L-smooth; the gradient
of every example has a norm of at most C, so that clipping does nothing, and a variance
of at most sigma^2 about its client's; the rule is (f, kappa)-robust averaging in the
spectral sense; and gamma_t and beta_t are those of the schedule.
"""

import math
from dataclasses import dataclass

from flwr_safedshb.theory.checks import batch, not_negative, positive
from flwr_safedshb.theory.robustness import check_num_malicious

# The theorem's numbers; 24 ties the momentum to the learning rate.
A1, A2, A3, A4 = 240.0, 480.0, 5760.0, 270.0
MOMENTUM_FACTOR = 24.0


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


def batch_variance(gradient_std: float, b: int, m: int) -> float:
    """Return sigma_b^2 = 2 (1 - b/m) sigma^2 / b, of a batch drawn without replacement.

    Stated with the convergence theorem. It is 0 for b = m.

    Parameters
    ----------
    gradient_std : float
        sigma: sigma^2 bounds the mean squared distance of the gradients of single
        examples from their client's; C will do where they are clipped at C.
    b, m : int
        Batch size and examples of a client.
    """
    not_negative(gradient_std=gradient_std)
    batch(b, m)
    return 2.0 * (1.0 - b / m) * gradient_std**2 / b


def effective_variance(
    n: int, f: int, d: int, batch_variance: float, noise_std: float, kappa: float
) -> float:
    """Return sbar^2, the variance that counts in both bounds.

    (sigma_b^2 + d sigma_DP^2)/(n-f) is that of the honest mean, and
    4 kappa (sigma_b^2 + 36 sigma_DP^2 (1 + d/(n-f))) what adversaries make of it.
    Stated with the convergence theorem.

    Parameters
    ----------
    n, f, d : int
        Clients, adversaries among them, parameters of the model.
    batch_variance : float
        sigma_b^2, see `batch_variance`.
    noise_std : float
        sigma_DP, in every coordinate.
    kappa : float
        Spectral constant of the rule.
    """
    check_num_malicious(n, f)
    positive(d=d)
    not_negative(batch_variance=batch_variance, noise_std=noise_std, kappa=kappa)
    honest = n - f
    noise = noise_std**2
    averaged = (batch_variance + d * noise) / honest
    return averaged + 4.0 * kappa * (batch_variance + 36.0 * noise * (1 + d / honest))


@dataclass(frozen=True)
class StronglyConvex:
    """The theorem's schedule for a mu-strongly convex L.

    gamma_t = 10/(mu (t + a1 L/mu)), beta_t = 1 - 24 L gamma_t: the first momentum is 0,
    and both tend to those of averaging over all of the past.

    Parameters
    ----------
    smoothness : float
        L.
    strong_convexity : float
        mu, at most L.
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
        return _momentum(self.smoothness, self.learning_rate(step))


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
        positive(
            smoothness=self.smoothness, initial_gap=self.initial_gap, steps=self.steps
        )
        not_negative(effective_std=self.effective_std)

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
        return _momentum(self.smoothness, self.learning_rate)


def strongly_convex_bound(
    smoothness: float,
    strong_convexity: float,
    kappa: float,
    heterogeneity: float,
    effective_variance: float,
    initial_gap: float,
    steps: int,
) -> Bound:
    """Bound E[L(theta_T) - L*] under `StronglyConvex` (convergence theorem).

    4 a1 kappa Gcov^2/mu + 2 a1^2 L sbar^2/(mu^2 T) + 2 a1^2 L^2 L0/(mu^2 T^2).

    Parameters
    ----------
    smoothness, strong_convexity : float
        L and mu.
    kappa : float
        Spectral constant of the rule.
    heterogeneity : float
        Gcov: Gcov^2 is the largest eigenvalue of the covariance of the honest clients'
        gradients, over all models; G, of the trace, is no smaller.
    effective_variance : float
        sbar^2.
    initial_gap : float
        L0 = L(theta_0) - L*.
    steps : int
        T.
    """
    _check_convexity(smoothness, strong_convexity)
    not_negative(
        kappa=kappa,
        heterogeneity=heterogeneity,
        effective_variance=effective_variance,
        initial_gap=initial_gap,
    )
    positive(steps=steps)
    square = strong_convexity**2
    return Bound(
        heterogeneity=4.0 * A1 * kappa * heterogeneity**2 / strong_convexity,
        noise=2.0 * A1**2 * smoothness * effective_variance / (square * steps),
        start=2.0 * A1**2 * smoothness**2 * initial_gap / (square * steps**2),
    )


def non_convex_bound(
    smoothness: float,
    kappa: float,
    heterogeneity: float,
    effective_variance: float,
    initial_gap: float,
    steps: int,
) -> Bound:
    """Bound E||grad L||^2 at a uniform iterate under `NonConvex` (convergence theorem).

    a2 kappa Gcov^2 + sqrt(a3 a4 L L0) sbar/sqrt(T) + a4 L L0/T; parameters as in
    `strongly_convex_bound`.
    """
    not_negative(
        kappa=kappa,
        heterogeneity=heterogeneity,
        effective_variance=effective_variance,
        initial_gap=initial_gap,
    )
    positive(smoothness=smoothness, steps=steps)
    scale = smoothness * initial_gap
    return Bound(
        heterogeneity=A2 * kappa * heterogeneity**2,
        noise=math.sqrt(A3 * A4 * scale * effective_variance / steps),
        start=A4 * scale / steps,
    )


def _momentum(smoothness: float, learning_rate: float) -> float:
    # At gamma = 1/(24 L) it is 0, and round-off must not leave it below.
    return max(0.0, 1.0 - MOMENTUM_FACTOR * smoothness * learning_rate)


def _check_convexity(smoothness: float, strong_convexity: float) -> None:
    positive(smoothness=smoothness, strong_convexity=strong_convexity)
    if strong_convexity > smoothness:
        raise ValueError(
            f"strong_convexity={strong_convexity} must be at most smoothness="
            f"{smoothness}: no function is more convex than it is smooth"
        )
