"""The exact delta of the worst adversary that chooses plans by looking at releases.

Nothing here is shared with the accountants: the losses of one step come from closed
forms, rounded up to a grid, so that delta is an upper bound of the true one and nearly
equal to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.signal import fftconvolve
from scipy.stats import norm

from flwr_safedshb.privacy.plan import PrivacyPlan

Floats = NDArray[np.float64]

# Losses are multiples of this; the state of an adversary is one in [-SPAN, SPAN].
SPACING = 2.0**-8
SPAN = 16.0
# What is farther out in a step's loss counts as certain.
_RARE = 1e-13


@dataclass(frozen=True)
class Move:
    """Steps of one plan, all with the datasets in one order.

    Attributes
    ----------
    plan : PrivacyPlan
        Sampling is "whole" or "fixed", in units of 2C/b.
    steps : int
    mirrored : bool
        Whether the datasets are in the other order, which matters where an example is
        drawn by chance.
    """

    plan: PrivacyPlan
    steps: int
    mirrored: bool = False


@dataclass(frozen=True)
class Loss:
    """Masses at ``first`` + i, in multiples of the spacing; ``top`` is beyond all."""

    first: int
    masses: Floats
    top: float


def loss_of(move: Move) -> Loss:
    """Return the loss of a move under the first dataset, rounded up."""
    std, rate = move.plan.noise_multiplier, move.plan.sampling_rate
    if move.plan.sampling == "whole":
        mean = move.steps / (2 * std**2)
        return _on_grid(norm(mean, math.sqrt(move.steps) / std).cdf, SPACING)
    spacing = SPACING / 16
    one = _on_grid(_sampled(std, rate, move.mirrored), spacing)
    size = 2 ** math.ceil(math.log2(len(one.masses) * move.steps))
    powers = np.fft.rfft(one.masses, size) ** move.steps
    masses = np.maximum(np.fft.irfft(powers, size), 0.0)
    first = one.first * move.steps
    # From the fine grid up to the coarse one.
    places = -(-(first + np.arange(size)) // 16)
    coarse: Floats = np.asarray(np.bincount(places - places[0], masses), np.float64)
    top = 1.0 - (1.0 - one.top) ** move.steps
    return Loss(int(places[0]), coarse, top + 1e-14)


def _sampled(std: float, rate: float, mirrored: bool) -> Callable[[Floats], Floats]:
    """Return the distribution function of log M/N under M, or of log N/M under N.

    M draws the example with probability q, and then the mean is 1 and not 0.
    """

    def output(losses: Floats) -> Floats:
        """Return where log M/N is a loss; -inf below the least one."""
        with np.errstate(divide="ignore", invalid="ignore"):
            inner = np.log(np.maximum(np.exp(losses) - (1 - rate), 0.0) / rate)
        found: Floats = std**2 * inner + 0.5
        return found

    if mirrored:
        return lambda losses: norm.sf(output(-losses) / std)
    return lambda losses: (
        (1 - rate) * norm.cdf(output(losses) / std)
        + rate * norm.cdf((output(losses) - 1) / std)
    )


def _on_grid(cdf: Callable[[Floats], Floats], spacing: float) -> Loss:
    points = np.arange(-round(SPAN / spacing), round(2 * SPAN / spacing) + 1)
    below = cdf(np.multiply(points, spacing, dtype=np.float64))
    masses = np.diff(below, prepend=0.0)
    kept = np.flatnonzero((below > _RARE) & (1 - below > _RARE))
    first, last = int(kept[0]), int(kept[-1]) + 1
    masses[first] = below[first]
    return Loss(
        int(points[first]), masses[first : last + 1], float(1 - below[last]) + _RARE
    )


def worst_delta(
    epsilon: float,
    moves: Sequence[Move],
    allowed: Callable[[tuple[int, ...]], bool],
    start: tuple[int, ...] | None = None,
) -> tuple[float, int]:
    """Return the delta at epsilon of the best of all adversaries, by value iteration.

    An adversary sees the loss so far, and goes on with any move that is allowed, or
    stops.

    Parameters
    ----------
    allowed : callable (how often each move was made) -> bool
    start : tuple of int, optional
        Moves that are made first, one after the other, whatever is released.

    Returns
    -------
    delta, histories
        And how many different histories are allowed.
    """
    half = round(SPAN / SPACING)
    grid = SPACING * np.arange(-half, half + 1)
    stopped = np.maximum(-np.expm1(np.minimum(epsilon - grid, 0.0)), 0.0)
    losses = [loss_of(move) for move in moves]
    values: dict[tuple[int, ...], Floats] = {}

    def value(counts: tuple[int, ...]) -> Floats:
        """Return delta for every loss so far, after these moves."""
        if counts not in values:
            best = stopped
            for i, loss in enumerate(losses):
                after = (*counts[:i], counts[i] + 1, *counts[i + 1 :])
                if allowed(after):
                    best = np.maximum(best, _expected(value(after), loss))
            values[counts] = best
        return values[counts]

    zero = (0,) * len(moves)
    if start is None:
        return float(value(zero)[half]), len(values)
    found = value(tuple(np.bincount(start, minlength=len(moves)).tolist()))
    for i in reversed(start):
        found = _expected(found, losses[i])
    return float(found[half]), len(values)


def _expected(values: Floats, loss: Loss) -> Floats:
    """Return the expected value after a loss; it does not decrease in the state."""
    last = loss.first + len(loss.masses) - 1
    before, after = max(-loss.first, 0), max(last, 0)
    # Below the grid the value is at most that of its end, above it is at most 1.
    padded = np.concatenate([np.full(before, values[0]), values, np.ones(after)])
    start = loss.first + before
    part = padded[start : start + len(values) + len(loss.masses) - 1]
    found: Floats = fftconvolve(part, loss.masses[::-1], "valid")
    # What rounding may have taken away.
    total: Floats = np.clip(found + loss.top + 1e-14, 0.0, 1.0)
    return total
