"""Privacy loss distributions on a grid, never optimistic: one step, and compositions.

For fixed-size sampling without replacement dp_accounting has none, so it is built here
from the library's parts: Zhu, Dong, Wang, "Optimal Accounting of Differential Privacy
via Characteristic Function", AISTATS 2022 (dominating pairs of subsampled mechanisms).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache, reduce

import numpy as np
from dp_accounting.pld.pld_pmf import (
    DensePLDPmf,
    create_pmf_pessimistic_connect_dots_fixed_gap,
)
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

from flwr_safedshb.privacy.plan import PrivacyPlan

# Grids differ by powers of two, so a coarser one only ever adds to epsilon.
BASE_INTERVAL = 1e-4
COARSE_INTERVAL = 8 * BASE_INTERVAL
_FINEST_INTERVAL = BASE_INTERVAL / 16
_MIN_STEP_POINTS = 2**10
_MAX_STEP_POINTS = 2**17
_MAX_TOTAL_POINTS = 2**22
# Mass that one composition may move to an infinite loss.
_TAIL_MASS = 1e-15


def composed_epsilon(
    steps: Mapping[PrivacyPlan, int], delta: float, interval: float
) -> float:
    """Epsilon of all steps together.

    Parameters
    ----------
    steps : mapping of PrivacyPlan to int
        Not empty; counts above 0, noise above 0, one adjacency.
    delta : float
        In (0, 1).
    interval : float
        Grid to start from: ``BASE_INTERVAL`` for a result that is reported.
    """
    interval = _fitting_interval(steps, interval)
    parts = (_composed(plan, count, interval) for plan, count in steps.items())
    total = reduce(lambda left, right: left.compose(right, _TAIL_MASS), parts)
    return float(total.get_epsilon_for_delta(delta))


@lru_cache(maxsize=8)
def _composed(
    plan: PrivacyPlan, steps: int, interval: float
) -> PrivacyLossDistribution:
    return one_step(plan, interval).self_compose(steps, _TAIL_MASS)


def _fitting_interval(steps: Mapping[PrivacyPlan, int], interval: float) -> float:
    """Scale the grid by a power of two to the losses that it has to hold."""
    widest = max(map(loss_range, steps))
    total = widest + sum(count * mean_loss(plan) for plan, count in steps.items())
    while interval > _FINEST_INTERVAL and widest / interval < _MIN_STEP_POINTS:
        interval /= 2
    while widest / interval > _MAX_STEP_POINTS or total / interval > _MAX_TOTAL_POINTS:
        interval *= 2
    return interval


def poisson_noise_multiplier(plan: PrivacyPlan) -> float:
    """Noise in units of C/b, as every Poisson accountant of dp_accounting reads it.

    A plan's multiplier counts in 2C/b, the replace-one sensitivity of a fixed-size
    batch. A Poisson batch either has the example or not, which moves the mean by C/b;
    the library accounts for a replaced example with that unit too. This function is the
    only place where the one unit becomes the other.
    """
    return 2.0 * plan.noise_multiplier


def loss_range(plan: PrivacyPlan) -> float:
    """Width of an interval that holds the privacy loss but for mass e^-50."""
    # The fixed-size profile dominates the Poisson ones, so its losses are the widest.
    lower, upper = _bounds(*_fixed_size_halves(plan))
    return upper - lower


def mean_loss(plan: PrivacyPlan) -> float:
    """Upper bound on the mean privacy loss of a step: a Renyi divergence of order 2."""
    exponent = plan.noise_multiplier**-2
    if exponent > 50:
        return exponent
    return math.log1p(plan.sampling_rate**2 * math.expm1(exponent))


@lru_cache(maxsize=32)
def one_step(plan: PrivacyPlan, interval: float) -> PrivacyLossDistribution:
    """Pessimistic privacy loss distribution of one step, on multiples of ``interval``.

    Parameters
    ----------
    plan : PrivacyPlan
        With ``noise_multiplier`` above 0.
    interval : float
        Distance of two grid points; a wider one never gives a smaller epsilon.
    """
    if plan.sampling == "fixed":
        return PrivacyLossDistribution(_pmf(*_fixed_size_halves(plan), interval))
    noise, rate = poisson_noise_multiplier(plan), plan.sampling_rate
    if plan.adjacency == "replace-one":
        loss = _loss(noise, rate, AdjacencyType.REPLACE)
        return PrivacyLossDistribution(_pmf(loss, loss, interval))
    # Adding and removing are two ordered pairs, composed apart; the worse one counts.
    removed, added = (
        _pmf(loss, loss, interval)
        for loss in (
            _loss(noise, rate, AdjacencyType.REMOVE),
            _loss(noise, rate, AdjacencyType.ADD),
        )
    )
    return PrivacyLossDistribution(removed, added)


def _fixed_size_halves(
    plan: PrivacyPlan,
) -> tuple[GaussianPrivacyLoss, GaussianPrivacyLoss]:
    """Return the two halves of the profile of fixed-size sampling under replace-one.

    In units of 2C/b, with N = N(0, s^2) and M = (1-q) N(0, s^2) + q N(1, s^2), one
    step is dominated by delta(eps) = H_{e^eps}(N || M) for eps < 0 and
    H_{e^eps}(M || N) for eps >= 0 (Zhu et al., sampling without replacement). Either
    pair alone belongs to one ordered pair of datasets and composes to less.
    """
    noise, rate = plan.noise_multiplier, plan.sampling_rate
    return (
        _loss(noise, rate, AdjacencyType.ADD),
        _loss(noise, rate, AdjacencyType.REMOVE),
    )


def _loss(noise: float, rate: float, direction: AdjacencyType) -> GaussianPrivacyLoss:
    return GaussianPrivacyLoss(noise, sampling_prob=rate, adjacency_type=direction)


def _pmf(
    below: GaussianPrivacyLoss, above: GaussianPrivacyLoss, interval: float
) -> DensePLDPmf:
    """Discretise the profile of ``below`` under 0 and of ``above`` from there on."""
    lower, upper = _bounds(below, above)
    first, last = math.floor(lower / interval), math.ceil(upper / interval)
    negative = np.arange(min(first, 0), 0) * interval
    positive = np.arange(0, max(last, 0) + 1) * interval
    deltas = np.concatenate(
        [below.get_delta_for_epsilon(negative), above.get_delta_for_epsilon(positive)]
    )
    pmf = create_pmf_pessimistic_connect_dots_fixed_gap(
        interval, min(first, 0), max(last, 0), deltas
    )
    # The library's sparse form raises its size to the number of steps.
    return pmf.to_dense_pmf()


def _bounds(
    below: GaussianPrivacyLoss, above: GaussianPrivacyLoss
) -> tuple[float, float]:
    lower = float(below.connect_dots_bounds().epsilon_lower)
    upper = float(above.connect_dots_bounds().epsilon_upper)
    return lower, upper
