"""Learning rates gamma_t and momentum coefficients beta_t: constants or functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Schedule = float | Callable[[int], float]


class Rates(Protocol):
    """gamma_t and beta_t together, as `SafeDSHB` takes them.

    `theory.StronglyConvex` and `theory.NonConvex` are those of the convergence theorem.
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


@dataclass(frozen=True)
class LinearDecay:
    """gamma_t = gamma (1 - t/T) with a constant beta: late pushes count for little.

    Parameters
    ----------
    initial_rate : float
        gamma, of the first step. The last one has gamma/T, and so has any after it.
    beta : float
    steps : int
        T.
    """

    initial_rate: float
    beta: float
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} must be at least 1")

    def learning_rate(self, step: int) -> float:
        """Return gamma_t."""
        return self.initial_rate * max(1.0, self.steps - step) / self.steps

    @property
    def momentum(self) -> float:
        """Return beta."""
        return self.beta


def rates_at(
    learning_rate: Schedule, momentum: Schedule, step: int
) -> tuple[float, float]:
    """Return gamma_t and the beta that clients use in step t.

    The listing of Algorithm 1 uses beta_{t-1} in step t >= 1, and m_0 = 0, so its step
    0 does not change the model. Here step 0 uses beta_0 and changes it: with constant
    rates this is the listing's run, shifted by one step.
    """
    gamma, before = _evaluate(learning_rate, step), max(step - 1, 0)
    if not (math.isfinite(gamma) and gamma > 0.0):
        raise ValueError(
            f"server_learning_rate={gamma} at step {step} must be finite and above 0"
        )
    beta = _evaluate(momentum, before)
    if not 0.0 <= beta < 1.0:
        raise ValueError(f"momentum={beta} at step {before} must lie in [0, 1)")
    return gamma, beta


def noise_left(betas: Sequence[float], local_steps: int = 1) -> float:
    """Return the standard deviation of the noise in a sent momentum, per unit of noise.

    The unit is the noise e of each private gradient. A step turns the noise v of a
    momentum into beta v + (1 - beta) e. A node sends the mean of K momentums, which
    contains a share of the v before them and a share of each of the K e's.

    Parameters
    ----------
    betas : sequence of float
        The momentum coefficients of the rounds so far, of a node that took part in all.
    local_steps : int
        K.
    """
    before, sent = 0.0, 0.0
    for beta in betas:
        powers = [beta**k for k in range(local_steps + 1)]
        past = sum(powers[1:]) / local_steps
        new = [
            (1.0 - beta) * sum(powers[: local_steps - k]) / local_steps
            for k in range(local_steps)
        ]
        sent = past**2 * before + sum(share**2 for share in new)
        for _ in range(local_steps):
            before = beta**2 * before + (1.0 - beta) ** 2
    return math.sqrt(sent)


def _evaluate(schedule: Schedule, step: int) -> float:
    return float(schedule(step) if callable(schedule) else schedule)
