"""Bound epsilon of many steps from above by their composed privacy loss distribution.

The losses of independent steps add up, so their distributions are convolved: the
Fourier transform of one step is raised to the power of the number of steps. Its
rounding errors are about 1e-11 in absolute terms, more than a small delta. So the
convolution works on a tilted distribution: every mass is multiplied by e^(r loss), and
all are divided by their sum. Its bulk lies near epsilon, so an absolute error of 1e-11
there becomes a relative error of delta.

Numerics, all on the pessimistic side
-------------------------------------
With a tilt r, K = log E[e^(r L)] of the total loss L, and tilted masses b(x),

    delta(eps) = e^(K - r eps) sum over x > eps of b(x) (1 - e^(eps-x)) e^(-r (x-eps)).

- Transforms, and what wraps around in them: see `pld_tilting`.
- The grid and the losses of one step: see `privacy_loss`.

The sum also gets the bound on the error of each mass, with that mass's weight, and all
missing mass, with weight 1, which no weight exceeds. So the result is an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache

import numpy as np
from scipy.optimize import brentq

from flwr_safedshb.privacy.accounting.pld_tilting import (
    MARGIN,
    TiltedDistribution,
    convolve,
    convolve_grids,
)
from flwr_safedshb.privacy.accounting.privacy_loss import (
    ORDERS,
    POSITIVE_ORDERS,
    Floats,
    Pair,
    compute_log_moments,
    discretize_step,
    measure_scales,
)
from flwr_safedshb.privacy.accounting.ranges import MAX_STEPS

Steps = Sequence[tuple[Pair, int]]

# log c_r for each positive order, where 1 - e^-y <= c_r e^(r y) for all y > 0:
# c_r = r^r / (1+r)^(1+r).
LOG_CONSTANTS: Floats = -POSITIVE_ORDERS * np.log1p(1 / POSITIVE_ORDERS) - np.log1p(
    POSITIVE_ORDERS
)

# Grid points between 0 and the typical loss of a step.
_POINTS_PER_LOSS = 32
_FINEST_SPACING = 2.0**-36
# Points of a grid in a window; a group with more is coarsened.
_MAX_POINTS = 2**20
# With more different plans epsilon is bounded by the moments alone, so that the time of
# a charge does not grow with the number of plans that a node has seen.
_MAX_PLANS = 16
# In the choice of a tilt, the weight of log(window width) against log(error weight).
_WIDTH_COST = 3.0
# The share of delta that pays for the truncated tail of large losses.
_TAIL_SHARE = 1e-5
# Of the root search for epsilon, and how often the root is then moved up.
_RELATIVE_TOLERANCE = 1e-9
_MAX_WIDENINGS = 10


def compute_moment_epsilon(steps: Steps, delta: float) -> float:
    """Bound epsilon by the moments of the loss, like an RDP accountant.

    Fast, and some percent larger than `compute_pld_epsilon`.
    """
    return _compose_steps(steps, delta).compute_moment_epsilon()


def compute_pld_epsilon(steps: Steps, delta: float) -> float:
    """Bound epsilon by the distribution of the loss.

    The result is never above `compute_moment_epsilon`, and equal to it for more than 16
    different plans.
    """
    return _compute_pld_epsilon(tuple(steps), delta)


def compute_filter_moments(steps: Steps, delta: float) -> tuple[Floats, float]:
    """Return log E[e^(r L)] of the total loss for every positive r, and log delta.

    For a privacy filter, whose steps are not known beforehand: the tail that is
    truncated from each step is so small that delta pays for `MAX_STEPS` of them.
    """
    tail_exponent = math.ceil(math.log2(MAX_STEPS / (_TAIL_SHARE * delta)))
    groups = [
        _StepGroup(pair, n, _choose_spacing(pair), tail_exponent) for pair, n in steps
    ]
    # True losses exceed the grid's by at most the slack.
    total = sum(g.log_moments[ORDERS > 0] + POSITIVE_ORDERS * g.slack for g in groups)
    return np.asarray(total), _reduce_delta(delta)


# Cached: a plan, its statement and the ledger that charges it ask for the same epsilon.
@lru_cache(maxsize=1024)
def _compute_pld_epsilon(steps: tuple[tuple[Pair, int], ...], delta: float) -> float:
    composition = _compose_steps(steps, delta)
    bound = composition.compute_moment_epsilon()
    if not bound < math.inf or len(steps) > _MAX_PLANS:
        return bound
    try:
        with np.errstate(all="ignore"):
            epsilon = composition.compute_pld_epsilon(bound)
    except (ArithmeticError, ValueError, MemoryError):
        # The losses exceed the precision of floats, or the grid exceeds the memory.
        return bound
    return epsilon if epsilon <= bound else bound


@dataclass(frozen=True)
class _StepGroup:
    """Equal steps: their dominating pair, their number and their grid of losses.

    Attributes
    ----------
    pair : DominatingPair or GroupPair
    count : int
    spacing : float
        Of the grid; a power of two.
    tail_exponent : int
        At most 2^-tail_exponent of a step's mass is truncated (`discretize_step`).
    """

    pair: Pair
    count: int
    spacing: float
    tail_exponent: int

    @property
    def log_moments(self) -> Floats:
        return (
            self.count
            * compute_log_moments(self.pair, self.spacing, self.tail_exponent)[0]
        )

    @property
    def slack(self) -> float:
        return (
            self.count
            * compute_log_moments(self.pair, self.spacing, self.tail_exponent)[1]
        )

    def tilt_and_convolve(self, order_index: int) -> TiltedDistribution:
        """Tilt the loss of one step and convolve it with itself for all steps."""
        one = discretize_step(self.pair, self.spacing, self.tail_exponent)
        tilt, moment = (
            float(ORDERS[order_index]),
            float(self.log_moments[order_index]) / self.count,
        )
        masses = one.masses * np.exp(tilt * one.points * self.spacing - moment)
        step = TiltedDistribution(self.spacing, one.points, masses)
        return convolve(
            [(step, self.count)], *_find_window(self.log_moments, order_index)
        )

    def coarsen(self, order_index: int) -> _StepGroup:
        """Return the group on a grid with at most `_MAX_POINTS` in its window."""
        points = _measure_width(self.log_moments, order_index) / self.spacing
        if not 0 < points < math.inf:
            raise ArithmeticError(f"a window of {points} points")
        factor = max(1, 2 ** math.ceil(math.log2(points / _MAX_POINTS)))
        return replace(self, spacing=self.spacing * factor)


@dataclass(frozen=True)
class _Composition:
    """The composition of all groups of steps, with their tails truncated."""

    groups: tuple[_StepGroup, ...]
    log_delta: float

    @cached_property
    def slack(self) -> float:
        return sum(group.slack for group in self.groups)

    @cached_property
    def log_moments(self) -> Floats:
        total: Floats = np.sum([group.log_moments for group in self.groups], axis=0)
        return total

    def compute_moment_epsilon(self) -> float:
        """Return the least epsilon with c_r e^(K - r epsilon) <= delta for some r."""
        moments = self.log_moments[ORDERS > 0]
        bounds = (moments + LOG_CONSTANTS - self.log_delta) / POSITIVE_ORDERS
        # An order whose bound is NaN or infinite is of no use.
        bounds = bounds[np.isfinite(bounds)]
        return max(0.0, float(bounds.min(initial=math.inf))) + self.slack

    def compute_pld_epsilon(self, bound: float) -> float:
        """Return epsilon by the composed distribution; it is at most `bound`."""
        order_index = self._choose_order(bound)
        if order_index is None:
            return math.inf
        groups = tuple(group.coarsen(order_index) for group in self.groups)
        coarse = replace(self, groups=groups)
        tilt, moment = (
            float(ORDERS[order_index]),
            float(coarse.log_moments[order_index]),
        )
        total = convolve_grids([g.tilt_and_convolve(order_index) for g in groups], tilt)
        start = bound - coarse.slack
        return _solve_epsilon(total, moment, tilt, self.log_delta, start) + coarse.slack

    def _choose_order(self, epsilon: float) -> int | None:
        """Return the index of the tilt's order in `ORDERS`, or None if none is usable.

        The choice balances the weight of errors against the width of the window. Errors
        weigh least at the order that bounds delta best. At larger orders the rare steps
        that draw the example may dominate and make the distribution very wide.
        """
        weights = self.log_moments - ORDERS * epsilon - self.log_delta
        usable = np.flatnonzero((ORDERS > 0) & (weights < MARGIN))
        # `_find_window` needs a larger order, too.
        usable = usable[usable < len(ORDERS) - 1]
        widths = np.array([_measure_width(self.log_moments, int(i)) for i in usable])
        fit = np.isfinite(widths) & (widths > 0)
        if not fit.any():
            return None
        cost = weights[usable[fit]] + _WIDTH_COST * np.log(widths[fit])
        return int(usable[fit][np.argmin(cost)])


def _compose_steps(steps: Steps, delta: float) -> _Composition:
    share = _TAIL_SHARE * delta / len(steps)
    groups = [
        _StepGroup(pair, n, _choose_spacing(pair), math.ceil(math.log2(n / share)))
        for pair, n in steps
    ]
    return _Composition(tuple(groups), _reduce_delta(delta))


def _reduce_delta(delta: float) -> float:
    """Return the log of what is left of delta after paying for the truncated tails."""
    return math.log(delta * (1.0 - 2 * _TAIL_SHARE))


def _choose_spacing(pair: Pair) -> float:
    typical, largest = measure_scales(pair)
    # The points of a grid are int64 multiples of the spacing.
    finest = max(typical / _POINTS_PER_LOSS, _FINEST_SPACING, largest * 2.0**-48)
    return 2.0 ** math.floor(math.log2(finest))


def _find_window(moments: Floats, order_index: int) -> tuple[float, float]:
    """Return the ends of a window that holds the tilted distribution up to 2 e^-30.

    By Chernoff's bound with each other order; the best bound on either side counts.
    """
    others = np.arange(len(ORDERS)) != order_index
    growth = moments[others] - moments[order_index] + MARGIN
    ends = growth / (ORDERS[others] - ORDERS[order_index])
    return float(np.nanmax(ends[:order_index])), float(np.nanmin(ends[order_index:]))


def _measure_width(moments: Floats, order_index: int) -> float:
    first, last = _find_window(moments, order_index)
    return last - first


def _solve_epsilon(
    total: TiltedDistribution,
    moment: float,
    tilt: float,
    log_delta: float,
    start: float,
) -> float:
    """Return the least epsilon with delta(epsilon) <= delta; `start` satisfies it."""
    losses = total.points * total.spacing

    @cache  # brentq evaluates both ends again
    def compute_excess(epsilon: float) -> float:
        """Return log(delta(epsilon) / delta), which does not increase in epsilon."""
        beyond = losses[np.searchsorted(losses, epsilon, side="right") :] - epsilon
        masses = total.masses[len(losses) - len(beyond) :]
        weights = -np.expm1(-beyond) * np.exp(-tilt * beyond)
        found = (
            float(weights @ masses) + total.error * float(weights.sum()) + total.missing
        )
        return moment - tilt * epsilon + math.log(found) - log_delta

    if losses[0] < 0 and compute_excess(0.0) <= 0:
        return 0.0
    least = max(0.0, float(losses[0]))
    if compute_excess(least) <= 0:
        return least
    # Written so that NaN fails the condition.
    if not (compute_excess(least) > 0 >= compute_excess(start)):
        return math.inf
    root = float(
        brentq(compute_excess, least, start, xtol=1e-300, rtol=_RELATIVE_TOLERANCE)
    )
    # The root may lie slightly below the least epsilon: move up until delta holds.
    for widening in 2.0 ** np.arange(_MAX_WIDENINGS):
        found = float(root * (1.0 + widening * _RELATIVE_TOLERANCE))
        if compute_excess(found) <= 0:
            return found
    return math.inf
