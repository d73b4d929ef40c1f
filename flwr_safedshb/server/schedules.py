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


def learning_rate_at(schedule: Schedule, step: int) -> float:
    """Return gamma_t, or say why it cannot be one."""
    value = _value(schedule, step)
    if not (math.isfinite(value) and value > 0.0):
        raise ValueError(
            f"server_learning_rate={value} at step {step} must be finite and above 0"
        )
    return value


def momentum_at(schedule: Schedule, step: int) -> float:
    """Return beta_t, or say why it cannot be one."""
    value = _value(schedule, step)
    if not 0.0 <= value < 1.0:
        raise ValueError(f"momentum={value} at step {step} must lie in [0, 1)")
    return value


def _value(schedule: Schedule, step: int) -> float:
    return float(schedule(step) if callable(schedule) else schedule)
