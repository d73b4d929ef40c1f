"""Calibration: the noise that meets a target epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from flwr_safedshb.privacy.accounting.accountant import compute_epsilon
from flwr_safedshb.privacy.accounting.ranges import (
    NOISE_MULTIPLIER,
    check_delta,
    check_steps,
)
from flwr_safedshb.privacy.plan import PrivacyPlan

# The least share of its target that a calibrated plan spends, and the share aimed at.
_LEAST_SHARE = 0.99
_AIMED_SHARE = 0.997
# Multipliers closer than this count as equal.
_RESOLUTION = 1e-6


@lru_cache(maxsize=256)
def calibrate(
    shape: PrivacyPlan,
    target_epsilon: float,
    delta: float,
    steps: int,
    beside: tuple[tuple[PrivacyPlan, int], ...] = (),
) -> PrivacyPlan:
    """Return a plan like ``shape`` whose noise just meets the target epsilon.

    Parameters
    ----------
    shape : PrivacyPlan
        A plan whose noise multiplier is ignored.
    target_epsilon, delta : float
    steps : int
    beside : tuple of (PrivacyPlan, int)
        Other releases of the same examples, which share the target.

    Returns
    -------
    PrivacyPlan
        Its epsilon is at most ``target_epsilon`` and, unless the accountant jumps
        there (sampling rates around 1e-6), at least 0.99 times that.
    """
    check_delta(delta)
    if not 0 < target_epsilon < math.inf:
        raise ValueError(f"target_epsilon={target_epsilon} must be positive and finite")
    if check_steps(steps) < 1:
        raise ValueError(f"steps={steps} must be at least 1 to calibrate noise")

    def compute_cost(noise_multiplier: float) -> float:
        plan = replace(shape, noise_multiplier=noise_multiplier)
        return compute_epsilon([(plan, steps), *beside], delta)

    alone = compute_epsilon(beside, delta)
    if not alone < target_epsilon:
        raise ValueError(
            f"target_epsilon={target_epsilon} is spent by the other releases, with "
            f"epsilon={alone:.4g}; give them more noise, or raise the target"
        )
    # By a Gaussian approximation that holds for much noise.
    spread = shape.sampling_rate * math.sqrt(2 * steps * math.log(1 / delta))
    start = min(max(spread / target_epsilon, 0.5), NOISE_MULTIPLIER.greatest)
    noise = _search_noise(compute_cost, target_epsilon, start, 1.2)
    return replace(shape, noise_multiplier=noise)


def _search_noise(
    cost: Callable[[float], float], target: float, start: float, factor: float
) -> float:
    """Find x with 0.99 target <= cost(x) <= target, for a decreasing cost."""
    too_low, enough = 0.0, math.inf
    cost_low, cost_enough = math.inf, 0.0
    noise = start
    while not _LEAST_SHARE * target <= (price := cost(noise)) <= target:
        if price > target:
            too_low, cost_low = noise, price
        else:
            enough, cost_enough = noise, price
        if enough < too_low * (1 + _RESOLUTION):
            return enough
        if too_low > 0 and enough < math.inf:
            noise = _interpolate_noise(too_low, cost_low, enough, cost_enough, target)
        else:
            noise = noise * factor if price > target else noise / factor
            factor *= factor
        least, greatest = NOISE_MULTIPLIER.least, NOISE_MULTIPLIER.greatest
        if not least <= noise <= greatest:
            raise ValueError(
                f"target_epsilon={target} needs a noise multiplier outside "
                f"[{least:g}, {greatest:g}]; choose a target nearer to 1"
            )
    return noise


def _interpolate_noise(
    low: float, cost_low: float, high: float, cost_high: float, target: float
) -> float:
    """Return where a power law through two points meets the aimed cost."""
    share = 0.5
    if cost_high > 0 and cost_low < math.inf:
        descent = math.log(cost_low / cost_high)
        share = math.log(cost_low / (_AIMED_SHARE * target)) / descent
    # Kept off the ends, so that the bracket shrinks even if the power law fits badly.
    share = min(max(share, 0.05), 0.95)
    return low * math.pow(high / low, share)
