"""Schedules of the paper's convergence theorem: learning rate and momentum by step."""

import math
from dataclasses import dataclass

from flwr_safedshb.theory.checks import not_negative, positive

# The theorem's numbers; 24 ties the momentum to the learning rate.
A1, A2, A3, A4 = 240.0, 480.0, 5760.0, 270.0
MOMENTUM_FACTOR = 24.0


@dataclass(frozen=True)
class StronglyConvex:
    """The theorem's schedule for a mu-strongly convex L, or one that is mu-PL.

    gamma_t = 10/(mu (t + a1 L/mu)), beta_t = 1 - 24 L gamma_t: beta_0 is 0, and both
    tend to those of averaging over all of the past.

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
        check_convexity(self.smoothness, self.strong_convexity)

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


def check_convexity(smoothness: float, strong_convexity: float) -> None:
    """Refuse an L and a mu that no function has."""
    positive(smoothness=smoothness, strong_convexity=strong_convexity)
    if strong_convexity > smoothness:
        raise ValueError(
            f"strong_convexity={strong_convexity} must be at most smoothness="
            f"{smoothness}: no function is more convex than it is smooth"
        )


def _momentum(smoothness: float, learning_rate: float) -> float:
    # At gamma = 1/(24 L) it is 0, and round-off must not leave it below.
    return max(0.0, 1.0 - MOMENTUM_FACTOR * smoothness * learning_rate)
