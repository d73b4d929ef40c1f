r"""Whether a training is likely to withstand adversaries: an estimate, not a theorem.

`stopping_radius` is proven for a model that stays put: where the gradient is longer, no
adversary turns a step uphill on average. Two things lie between that and the end of a
training. Colluders reach less than the bound allows. And momentum swings: with
m' = (1 - beta)(g - m) and theta' = -gamma m, a model on a loss of curvature L is an
oscillator of quality Q = sqrt(gamma L/(1 - beta)), and adversaries who push against the
gradient in every step drive it at its own frequency, so what they reach is up to about
Q times what one push does.

So a training is said to withstand if radius max(1, Q) < `MARGIN` times the gradient at
its first model. The margin is measured, on the paper's task with noise multiplier 1
and 400 steps, and tried on other settings of that task: ``python -m
simulations.study withstand``. It is wrong on both sides: on other tasks trainings
that it calls safe have failed.
"""

from __future__ import annotations

import math

from flwr_safedshb.theory.checks import not_negative, positive

MARGIN = 3.6


def swing(momentum: float, learning_rate: float, smoothness: float) -> float:
    """Return max(1, sqrt(gamma L/(1 - beta))), by how much pushes in step add up.

    Parameters
    ----------
    momentum : float
        beta, in [0, 1).
    learning_rate : float
        gamma, of the server.
    smoothness : float
        L, the curvature of the loss along its gradient; 0 if it is not known.
    """
    not_negative(smoothness=smoothness)
    positive(learning_rate=learning_rate)
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"momentum={momentum} must lie in [0, 1)")
    return max(1.0, math.sqrt(learning_rate * smoothness / (1.0 - momentum)))


def withstands(radius: float, gradient: float, swinging: float = 1.0) -> bool:
    """Estimate whether at least half of a training's progress stays under attack.

    Parameters
    ----------
    radius : float
        Of `stopping_radius`.
    gradient : float
        The length of the gradient at the first model.
    swinging : float
        Of `swing`.
    """
    not_negative(radius=radius, gradient=gradient, swinging=swinging)
    return radius * swinging < MARGIN * gradient
