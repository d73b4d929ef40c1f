"""The privacy loss of many steps together, with a bound on all numerical errors.

The losses of independent steps add up, so their distributions are convolved: the
Fourier transform of one step to the power of the number of steps. Its rounding errors
are of some 1e-11 in absolute terms, more than a small delta. So everything happens in a
tilted distribution, e^(r loss) times as likely and scaled to add up to 1, which has its
bulk where epsilon is: there an absolute error of 1e-11 is a relative error of delta.

Numerics, all on the pessimistic side
-------------------------------------
With a tilt r, K = log E[e^(r L)] of the total loss L, and tilted masses b(x),

    delta(eps) = e^(K - r eps) sum over x > eps of b(x) (1 - e^(eps-x)) e^(-r (x-eps)).

- Transforms, and what wraps around in them: see `tilted`.
- The grid and the losses of one step: see `losses`.

Errors of masses and missing mass are multiplied by what they can weigh in the sum above
and added to it, so that what is returned is an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

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
    Floats,
    discretize_step,
    measure_scales,
    moments,
)
from flwr_safedshb.privacy.accounting.ranges import MAX_STEPS
from flwr_safedshb.privacy.samplers import DominatingPair

Steps = Sequence[tuple[DominatingPair, int]]

# Points in a typical loss; half as many where the grid had to be rounded up.
_FINENESS = 32
_FINEST_SPACING = 2.0**-36
_MAX_POINTS = 2**20
# With more kinds of steps than this the quick bound must do: a charge must not take
# the longer, the more plans a node has seen.
_MAX_KINDS = 16
# What a window of twice the width counts, against errors that weigh twice as much.
_WIDTH_COST = 3.0
# The share of delta that pays for losses too large to be kept.
_REMOVED = 1e-5
_PRECISION = 1e-9
_WIDENINGS = 10


def compute_moment_epsilon(steps: Steps, delta: float) -> float:
    """Bound epsilon by the moments of the loss: fast, and some percent too large."""
    return _Composition(steps, delta).compute_moment_epsilon()


def compute_pld_epsilon(steps: Steps, delta: float) -> float:
    """Bound epsilon by the distribution of the loss, and never above the quick way.

    Of more than 16 different plans it is the quick bound.
    """
    return _compute_pld_epsilon(tuple(steps), delta)


def compute_filter_moments(steps: Steps, delta: float) -> tuple[Floats, float]:
    """Return log E[e^(r L)] of the total loss for every positive r, and log delta.

    Steps need not be known beforehand. What is left out of the losses is the same for
    each step, and so little that delta pays for as many as can be charged.
    """
    level = _choose_level(MAX_STEPS / (_REMOVED * delta))
    parts = [
        _StepGroup(profile, n, _choose_spacing(profile), level) for profile, n in steps
    ]
    positive = ORDERS > 0
    # A loss may be larger than it is said to be by the slack.
    total = sum(p.moments[positive] + ORDERS[positive] * p.slack for p in parts)
    return np.asarray(total), math.log(delta * (1.0 - 2 * _REMOVED))


# A plan, its statement and a ledger that pays for it ask for the same again.
@lru_cache(maxsize=1024)
def _compute_pld_epsilon(
    steps: tuple[tuple[DominatingPair, int], ...], delta: float
) -> float:
    total = _Composition(steps, delta)
    quick = total.compute_moment_epsilon()
    if not quick < math.inf or len(steps) > _MAX_KINDS:
        return quick
    try:
        with np.errstate(all="ignore"):
            exact = _compose(total, quick)
    except (ArithmeticError, ValueError, MemoryError):
        # Losses beyond the precision of floats, or grids beyond all memory.
        return quick
    return exact if exact <= quick else quick


def _compose(total: _Composition, quick: float) -> float:
    order = total.tilt(quick)
    if order is None:
        return math.inf
    tilt = float(ORDERS[order])
    total.fit(order)
    composed = convolve_grids(
        [_compose_group(part, order) for part in total.parts], tilt
    )
    start = quick - total.slack
    found = _solve_epsilon(
        composed, float(total.moments[order]), tilt, total.log_delta, start
    )
    return found + total.slack


@dataclass(frozen=True)
class _StepGroup:
    """Equal steps: their profile, how many, and how their losses are put on a grid."""

    profile: DominatingPair
    count: int
    spacing: float
    level: int

    @property
    def moments(self) -> Floats:
        return self.count * moments(self.profile, self.spacing, self.level)[0]

    @property
    def slack(self) -> float:
        return self.count * moments(self.profile, self.spacing, self.level)[1]


class _Composition:
    """All steps of every kind, without losses too large to matter."""

    def __init__(self, steps: Steps, delta: float) -> None:
        share = _REMOVED * delta / len(steps)
        self._set(
            [
                _StepGroup(
                    profile,
                    count,
                    _choose_spacing(profile),
                    _choose_level(count / share),
                )
                for profile, count in steps
            ],
            math.log(delta * (1.0 - 2 * _REMOVED)),
        )

    def _set(self, parts: list[_StepGroup], log_delta: float) -> None:
        self.parts, self.log_delta = parts, log_delta
        self.slack = sum(part.slack for part in parts)
        self.moments: Floats = np.sum([part.moments for part in parts], axis=0)

    def compute_moment_epsilon(self) -> float:
        """Bound epsilon by any moment.

        1 - e^-y <= c e^(r y) with c = r^r / (1+r)^(1+r), for all y > 0 and r > 0, so
        delta(eps) is at most c e^(K - r eps).
        """
        r = ORDERS[ORDERS > 0]
        constants = -r * np.log1p(1 / r) - np.log1p(r)
        bounds = (self.moments[ORDERS > 0] + constants - self.log_delta) / r
        # Whatever is not finite bounds nothing.
        bounds = bounds[np.isfinite(bounds)]
        return max(0.0, float(bounds.min(initial=math.inf))) + self.slack

    def tilt(self, epsilon: float) -> int | None:
        """Choose the order of the tilt: errors that weigh little, and a narrow window.

        At the order that bounds delta best, errors weigh least; beyond it the rare
        steps that draw the example may dominate, and make the distribution very wide.
        None if no order will do.
        """
        weights = self.moments - ORDERS * epsilon - self.log_delta
        usable = np.flatnonzero((ORDERS > 0) & (weights < MARGIN))
        # A window needs an order to either side, and the largest one has none.
        usable = usable[usable < len(ORDERS) - 1]
        widths = np.array(
            [_measure_width(self.moments, int(order)) for order in usable]
        )
        fit = np.isfinite(widths) & (widths > 0)
        if not fit.any():
            return None
        cost = weights[usable[fit]] + _WIDTH_COST * np.log(widths[fit])
        return int(usable[fit][np.argmin(cost)])

    def fit(self, order: int) -> None:
        """Choose coarser grids where there would be too many points."""
        parts = []
        for part in self.parts:
            points = _measure_width(part.moments, order) / part.spacing
            if not 0 < points < math.inf:
                raise ArithmeticError(f"a window of {points} points")
            times = max(1, 2 ** math.ceil(math.log2(points / _MAX_POINTS)))
            parts.append(replace(part, spacing=part.spacing * times))
        self._set(parts, self.log_delta)


def _choose_level(share: float) -> int:
    return math.ceil(math.log2(share))


def _choose_spacing(profile: DominatingPair) -> float:
    typical, largest = measure_scales(profile)
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


def _compose_group(part: _StepGroup, order: int) -> TiltedDistribution:
    """Convolve one step with itself as often as it is taken."""
    one = discretize_step(part.profile, part.spacing, part.level)
    tilt, moment = float(ORDERS[order]), float(part.moments[order]) / part.count
    masses = one.masses * np.exp(tilt * one.points * part.spacing - moment)
    first, last = _find_window(part.moments, order)
    step = TiltedDistribution(part.spacing, one.points, masses)
    return convolve([(step, part.count)], first, last)


def _solve_epsilon(
    total: TiltedDistribution,
    moment: float,
    tilt: float,
    log_delta: float,
    start: float,
) -> float:
    """Find the least epsilon with delta(epsilon) <= delta, from one that has it."""
    losses = total.points * total.spacing

    @cache  # both ends are asked for again by the search
    def excess(epsilon: float) -> float:
        """Return log delta(epsilon) less the aim; it does not increase."""
        beyond = losses[np.searchsorted(losses, epsilon, side="right") :] - epsilon
        masses = total.masses[len(losses) - len(beyond) :]
        weights = -np.expm1(-beyond) * np.exp(-tilt * beyond)
        found = (
            float(weights @ masses) + total.error * float(weights.sum()) + total.missing
        )
        return moment - tilt * epsilon + math.log(found) - log_delta

    if losses[0] < 0 and excess(0.0) <= 0:
        return 0.0
    least = max(0.0, float(losses[0]))
    if excess(least) <= 0:
        return least
    # Written so that what is not a number is no bound at all.
    if not (excess(least) > 0 >= excess(start)):
        return math.inf
    root = float(brentq(excess, least, start, xtol=1e-300, rtol=_PRECISION))
    # On the side where delta is kept; the root itself may lie on the other.
    for widening in 2.0 ** np.arange(_WIDENINGS):
        found = float(root * (1.0 + widening * _PRECISION))
        if excess(found) <= 0:
            return found
    return math.inf
