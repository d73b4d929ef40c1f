"""Epsilon of many steps from their composed privacy loss distribution: an upper bound.

The losses of independent steps add up, so their distributions are convolved: the
Fourier transform of one step to the power of the number of steps. Its rounding errors
are about 1e-11 in absolute terms, more than a small delta. So everything happens in a
tilted distribution, e^(r loss) times as likely and scaled to add up to 1, which has its
bulk where epsilon is: there an absolute error of 1e-11 is a relative error of delta.

Numerics, all on the pessimistic side
-------------------------------------
With a tilt r, K = log E[e^(r L)] of the total loss L, and tilted masses b(x),

    delta(eps) = e^(K - r eps) sum over x > eps of b(x) (1 - e^(eps-x)) e^(-r (x-eps)).

- Transforms, and what wraps around in them: see `pld_tilting`.
- The grid and the losses of one step: see `privacy_loss`.

Errors of masses and missing mass are multiplied by their largest weight in the sum
above and added to it, so the result is an upper bound.
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
    compute_moments,
    discretize_step,
    measure_scales,
)
from flwr_safedshb.privacy.accounting.ranges import MAX_STEPS
from flwr_safedshb.privacy.samplers import DominatingPair

Steps = Sequence[tuple[DominatingPair, int]]

# log c_r for each positive order, where 1 - e^-y <= c_r e^(r y) for all y > 0:
# c_r = r^r / (1+r)^(1+r).
LOG_CONSTANTS: Floats = -POSITIVE_ORDERS * np.log1p(1 / POSITIVE_ORDERS) - np.log1p(
    POSITIVE_ORDERS
)

# Points in a typical loss; half as many where the grid had to be rounded up.
_FINENESS = 32
_FINEST_SPACING = 2.0**-36
_MAX_POINTS = 2**20
# Above this number of different plans the moments must do: a charge must not take
# longer, the more plans a node has seen.
_MAX_KINDS = 16
# What a window of twice the width costs, against errors that weigh twice as much.
_WIDTH_COST = 3.0
# The share of delta that pays for losses too large to be kept.
_REMOVED = 1e-5
_PRECISION = 1e-9
_WIDENINGS = 10


def compute_moment_epsilon(steps: Steps, delta: float) -> float:
    """Bound epsilon by the moments of the loss: fast, and some percent too large."""
    return _compose_steps(steps, delta).compute_moment_epsilon()


def compute_pld_epsilon(steps: Steps, delta: float) -> float:
    """Bound epsilon by the distribution of the loss, never above the moments' bound.

    Of more than 16 different plans it is the moments' bound.
    """
    return _compute_pld_epsilon(tuple(steps), delta)


def compute_filter_moments(steps: Steps, delta: float) -> tuple[Floats, float]:
    """Return log E[e^(r L)] of the total loss for every positive r, and log delta.

    Steps need not be known beforehand: the same share of each step's loss is left out,
    so small that delta pays for as many steps as can be charged.
    """
    level = math.ceil(math.log2(MAX_STEPS / (_REMOVED * delta)))
    groups = [_StepGroup(pair, n, _choose_spacing(pair), level) for pair, n in steps]
    # A loss may be larger than the grid says, by the slack.
    total = sum(g.moments[ORDERS > 0] + POSITIVE_ORDERS * g.slack for g in groups)
    return np.asarray(total), _reduce_delta(delta)


# A plan, its statement and a ledger that pays for it ask for the same again.
@lru_cache(maxsize=1024)
def _compute_pld_epsilon(
    steps: tuple[tuple[DominatingPair, int], ...], delta: float
) -> float:
    composition = _compose_steps(steps, delta)
    bound = composition.compute_moment_epsilon()
    if not bound < math.inf or len(steps) > _MAX_KINDS:
        return bound
    try:
        with np.errstate(all="ignore"):
            epsilon = composition.compute_pld_epsilon(bound)
    except (ArithmeticError, ValueError, MemoryError):
        # Losses beyond the precision of floats, or grids beyond all memory.
        return bound
    return epsilon if epsilon <= bound else bound


@dataclass(frozen=True)
class _StepGroup:
    """Equal steps: their dominating pair, their number and their grid of losses."""

    pair: DominatingPair
    count: int
    spacing: float
    level: int

    @property
    def moments(self) -> Floats:
        return self.count * compute_moments(self.pair, self.spacing, self.level)[0]

    @property
    def slack(self) -> float:
        return self.count * compute_moments(self.pair, self.spacing, self.level)[1]

    def tilt_and_convolve(self, order: int) -> TiltedDistribution:
        """Tilt the loss of one step and convolve it with itself for all steps."""
        one = discretize_step(self.pair, self.spacing, self.level)
        tilt, moment = float(ORDERS[order]), float(self.moments[order]) / self.count
        masses = one.masses * np.exp(tilt * one.points * self.spacing - moment)
        step = TiltedDistribution(self.spacing, one.points, masses)
        return convolve([(step, self.count)], *_find_window(self.moments, order))

    def coarsen(self, order: int) -> _StepGroup:
        """Return the group on a grid that is coarse enough for its window."""
        points = _measure_width(self.moments, order) / self.spacing
        if not 0 < points < math.inf:
            raise ArithmeticError(f"a window of {points} points")
        times = max(1, 2 ** math.ceil(math.log2(points / _MAX_POINTS)))
        return replace(self, spacing=self.spacing * times)


@dataclass(frozen=True)
class _Composition:
    """All steps of every kind, without losses too large to matter."""

    groups: tuple[_StepGroup, ...]
    log_delta: float

    @cached_property
    def slack(self) -> float:
        return sum(group.slack for group in self.groups)

    @cached_property
    def moments(self) -> Floats:
        total: Floats = np.sum([group.moments for group in self.groups], axis=0)
        return total

    def compute_moment_epsilon(self) -> float:
        """Return the least epsilon with c_r e^(K - r epsilon) <= delta for some r."""
        moments = self.moments[ORDERS > 0]
        bounds = (moments + LOG_CONSTANTS - self.log_delta) / POSITIVE_ORDERS
        # Whatever is not finite bounds nothing.
        bounds = bounds[np.isfinite(bounds)]
        return max(0.0, float(bounds.min(initial=math.inf))) + self.slack

    def compute_pld_epsilon(self, bound: float) -> float:
        """Return epsilon by the composed distribution, from a bound above it."""
        order = self._choose_order(bound)
        if order is None:
            return math.inf
        groups = tuple(group.coarsen(order) for group in self.groups)
        coarse = replace(self, groups=groups)
        tilt, moment = float(ORDERS[order]), float(coarse.moments[order])
        total = convolve_grids([g.tilt_and_convolve(order) for g in groups], tilt)
        start = bound - coarse.slack
        return _solve_epsilon(total, moment, tilt, self.log_delta, start) + coarse.slack

    def _choose_order(self, epsilon: float) -> int | None:
        """Choose the order of the tilt: errors that weigh little, and a narrow window.

        At the order that bounds delta best, errors weigh least; beyond it the rare
        steps that draw the example may dominate, and make the distribution very wide.
        None if no order will do.
        """
        weights = self.moments - ORDERS * epsilon - self.log_delta
        usable = np.flatnonzero((ORDERS > 0) & (weights < MARGIN))
        # A window needs an order to either side, and the largest one has none.
        usable = usable[usable < len(ORDERS) - 1]
        widths = np.array([_measure_width(self.moments, int(i)) for i in usable])
        fit = np.isfinite(widths) & (widths > 0)
        if not fit.any():
            return None
        cost = weights[usable[fit]] + _WIDTH_COST * np.log(widths[fit])
        return int(usable[fit][np.argmin(cost)])


def _compose_steps(steps: Steps, delta: float) -> _Composition:
    share = _REMOVED * delta / len(steps)
    groups = [
        _StepGroup(pair, n, _choose_spacing(pair), math.ceil(math.log2(n / share)))
        for pair, n in steps
    ]
    return _Composition(tuple(groups), _reduce_delta(delta))


def _reduce_delta(delta: float) -> float:
    """Return the log of what is left of delta once removed losses are paid for."""
    return math.log(delta * (1.0 - 2 * _REMOVED))


def _choose_spacing(pair: DominatingPair) -> float:
    typical, largest = measure_scales(pair)
    # The points of a grid are counted, in integers.
    finest = max(typical / _FINENESS, _FINEST_SPACING, largest * 2.0**-48)
    return 2.0 ** math.floor(math.log2(finest))


def _find_window(moments: Floats, order: int) -> tuple[float, float]:
    """Return losses between which all but 2 e^-30 of the tilted distribution lies."""
    others = np.arange(len(ORDERS)) != order
    growth = moments[others] - moments[order] + MARGIN
    ends = growth / (ORDERS[others] - ORDERS[order])
    return float(np.nanmax(ends[:order])), float(np.nanmin(ends[order:]))


def _measure_width(moments: Floats, order: int) -> float:
    first, last = _find_window(moments, order)
    return last - first


def _solve_epsilon(
    total: TiltedDistribution,
    moment: float,
    tilt: float,
    log_delta: float,
    start: float,
) -> float:
    """Find the least epsilon with delta(epsilon) <= delta, from one that has it."""
    losses = total.points * total.spacing

    @cache  # the search asks for both ends again
    def compute_excess(epsilon: float) -> float:
        """Return log delta(epsilon) less the aim; it does not increase."""
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
    # Written so that NaN is no bound at all.
    if not (compute_excess(least) > 0 >= compute_excess(start)):
        return math.inf
    root = float(brentq(compute_excess, least, start, xtol=1e-300, rtol=_PRECISION))
    # On the side where delta is kept; the root itself may lie on the other.
    for widening in 2.0 ** np.arange(_WIDENINGS):
        found = float(root * (1.0 + widening * _PRECISION))
        if compute_excess(found) <= 0:
            return found
    return math.inf
