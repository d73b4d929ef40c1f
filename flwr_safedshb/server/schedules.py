"""Learning rates gamma_t and momentum coefficients beta_t: constants or functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

Schedule = float | Callable[[int], float]


class Rates(Protocol):
    """gamma_t and beta_t together, as `SafeDSHB` takes them.

    The convergence theorem's are `theory.StronglyConvex` and `theory.NonConvex`.
    """

    @property
    def learning_rate(self) -> Schedule:
        """Return gamma_t."""
        ...

    @property
    def momentum(self) -> Schedule:
        """Return beta_t."""
        ...


@dataclass(frozen=True)
class Constant:
    """The same gamma and beta in every step, as in the paper's experiments."""

    learning_rate: float
    momentum: float


def rates_at(
    learning_rate: Schedule, momentum: Schedule, step: int
) -> tuple[float, float]:
    """Return gamma_t and the beta that clients use in step t, or say what is wrong.

    The listing of Algorithm 1 has beta_{t-1} in step t, for t >= 1, and m_0 = 0, so
    that its step 0 moves nothing. Ours is that run shifted by one step: beta_0 in step
    0.
    """
    gamma, before = _value(learning_rate, step), max(step - 1, 0)
    if not (math.isfinite(gamma) and gamma > 0.0):
        raise ValueError(
            f"server_learning_rate={gamma} at step {step} must be finite and above 0"
        )
    beta = _value(momentum, before)
    if not 0.0 <= beta < 1.0:
        raise ValueError(f"momentum={beta} at step {before} must lie in [0, 1)")
    return gamma, beta


def _value(schedule: Schedule, step: int) -> float:
    return float(schedule(step) if callable(schedule) else schedule)
