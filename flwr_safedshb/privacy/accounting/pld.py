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

- Transforms: a transform of size N by stages errs by at most log2(N) times some 7 units
  of rounding, relative in the 2-norm (Higham, "Accuracy and Stability of Numerical
  Algorithms", Theorem 24.2). How that grows with the power is bounded with the very
  transform: |A^T - B^T| <= T |A - B| max(|A|, |B|)^(T-1) for each frequency.
- Wrapping around: a mass beyond the end of the window appears inside it, which only
  adds; that it is missing where it belongs is bounded by its moments (Chernoff).
- The grid and the losses of one step: see `losses`.

Errors of masses and missing mass are multiplied by what they can weigh in the sum above
and added to it, so that what is returned is an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

from flwr_safedshb.privacy.accounting.losses import (
    ORDERS,
    Floats,
    Integers,
    Losses,
    one_step,
    scales,
)
from flwr_safedshb.privacy.samplers import Profile

Steps = Sequence[tuple[Profile, int]]

# Points in a typical loss; half as many where the grid had to be rounded up.
_FINENESS = 32
_FINEST_SPACING = 2.0**-36
_MAX_POINTS = 2**20
_MAX_SIZE = 4 * _MAX_POINTS
# Of the tilted distribution, e^-30 may be outside of the window.
_MARGIN = 30.0
# What a window of twice the width counts, against errors that weigh twice as much.
_WIDTH_COST = 3.0
_ROUNDING = 4 * float(np.finfo(float).eps)
# The share of delta that pays for losses too large to be kept.
_REMOVED = 1e-5
_PRECISION = 1e-9
_WIDENINGS = 10


def quick_epsilon(steps: Steps, delta: float) -> float:
    """Bound epsilon by the moments of the loss: fast, and some percent too large."""
    return _Steps(steps, delta).quick_epsilon()


def composed_epsilon(steps: Steps, delta: float) -> float:
    """Bound epsilon by the distribution of the loss, and never above the quick way."""
    total = _Steps(steps, delta)
    quick = total.quick_epsilon()
    if not quick < math.inf:
        return math.inf
    try:
        with np.errstate(all="ignore"):
            exact = _exact(total, quick)
    except ArithmeticError:  # losses beyond the precision of floats
        return quick
    return exact if exact <= quick else quick


def _exact(total: _Steps, quick: float) -> float:
    order = total.tilt(quick)
    if order is None:
        return math.inf
    tilt = float(ORDERS[order])
    total = total.fitting(order)
    composed = _joined([_composed(*part, order) for part in total.parts], tilt)
    start = quick - total.slack
    found = _solve(composed, float(total.moments[order]), tilt, total.log_delta, start)
    return found + total.slack


class _Steps:
    """One step of each kind, without losses too large to matter, and how many."""

    def __init__(self, steps: Steps, delta: float, coarser: Sequence[int] = ()) -> None:
        self._given = steps, delta
        share = _REMOVED * delta / len(steps)
        self.parts = [
            (
                one_step(
                    profile,
                    _spacing(profile) * times,
                    math.ceil(math.log2(count / share)),
                ),
                count,
            )
            for (profile, count), times in zip(
                steps, coarser or [1] * len(steps), strict=True
            )
        ]
        self.log_delta = math.log(delta * (1.0 - 2 * _REMOVED))
        self.slack = sum(count * part.slack for part, count in self.parts)
        self.moments: Floats = np.sum(
            [count * part.moments for part, count in self.parts], axis=0
        )

    def quick_epsilon(self) -> float:
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
        usable = np.flatnonzero((ORDERS > 0) & (weights < _MARGIN))
        # A window needs an order to either side, and the largest one has none.
        usable = usable[usable < len(ORDERS) - 1]
        widths = np.array([_width(self.moments, int(order)) for order in usable])
        fit = np.isfinite(widths) & (widths > 0)
        if not fit.any():
            return None
        cost = weights[usable[fit]] + _WIDTH_COST * np.log(widths[fit])
        return int(usable[fit][np.argmin(cost)])

    def fitting(self, order: int) -> _Steps:
        """Return the same steps, on coarser grids where they need too many points."""
        coarser = []
        for part, count in self.parts:
            points = _width(count * part.moments, order) / part.spacing
            if not 0 < points < math.inf:
                raise ArithmeticError(f"a window of {points} points")
            coarser.append(max(1, 2 ** math.ceil(math.log2(points / _MAX_POINTS))))
        return self if max(coarser) == 1 else _Steps(*self._given, coarser)


def _spacing(profile: Profile) -> float:
    typical, largest = scales(profile)
    # The points of a grid are counted, in integers.
    finest = max(typical / _FINENESS, _FINEST_SPACING, largest * 2.0**-48)
    return 2.0 ** math.floor(math.log2(finest))


def _window(moments: Floats, order: int) -> tuple[float, float]:
    """Return losses between which all but 2 e^-30 of the tilted distribution lies."""
    others = np.arange(len(ORDERS)) != order
    growth = moments[others] - moments[order] + _MARGIN
    ends = growth / (ORDERS[others] - ORDERS[order])
    return float(np.nanmax(ends[:order])), float(np.nanmin(ends[order:]))


def _width(moments: Floats, order: int) -> float:
    first, last = _window(moments, order)
    return last - first


@dataclass(frozen=True)
class _Tilted:
    """A tilted distribution of losses.

    Attributes
    ----------
    points : ndarray of int64, shape (k,)
        In multiples of ``spacing``.
    masses : ndarray, shape (k,)
    error : float
        What any mass may be too small by.
    missing : float
        Mass that is nowhere.
    """

    spacing: float
    points: Integers
    masses: Floats
    error: float = 0.0
    missing: float = 0.0


def _composed(part: Losses, count: int, order: int) -> _Tilted:
    """Convolve one step with itself ``count`` times."""
    tilt, moment = float(ORDERS[order]), float(part.moments[order])
    losses = part.points * part.spacing
    masses = part.masses * np.exp(tilt * losses - moment)
    first, last = _window(part.moments * count, order)
    step = _Tilted(part.spacing, part.points, masses)
    return _convolved([(step, count)], first, last)


def _convolved(
    parts: Sequence[tuple[_Tilted, int]], first: float, last: float
) -> _Tilted:
    """Convolve distributions of one spacing on a window that holds the result."""
    spacing = parts[0][0].spacing
    start = math.floor(first / spacing)
    size = 2 ** math.ceil(math.log2(math.ceil(last / spacing) - start + 1))
    if size > _MAX_SIZE:
        raise ArithmeticError(f"a transform of {size} points")
    rounding = _ROUNDING * math.log2(size)
    logarithm = np.zeros(size // 2 + 1, complex)
    reached = np.zeros(size // 2 + 1)
    transforms = []
    for part, count in parts:
        masses = np.asarray(np.bincount(part.points % size, part.masses, size), float)
        transform = np.fft.rfft(masses)
        error = rounding * float(np.linalg.norm(masses))
        # No frequency of a distribution is above its mass.
        reach = np.minimum(np.abs(transform) + error * math.sqrt(size), masses.sum())
        logarithm += count * np.log(np.where(transform == 0, 1e-300, transform))
        reached += count * np.log(reach)
        transforms.append((count, error, reach))
    masses = np.fft.irfft(np.exp(logarithm), size)
    error = rounding * float(np.linalg.norm(masses))
    for (count, norm, reach), (part, _) in zip(transforms, parts, strict=True):
        others = np.exp(reached - np.log(reach))
        error += count * norm * math.sqrt(2 * float(others @ others) / size)
        error += count * 4 * _ROUNDING * 2 * float(np.exp(reached).sum()) / size
        error += count * part.error
    missing = math.exp(-_MARGIN) + sum(count * part.missing for part, count in parts)
    points = start + np.arange(size)
    return _Tilted(
        spacing, points, np.maximum(masses, 0.0)[points % size], error, missing
    )


def _joined(parts: Sequence[_Tilted], tilt: float) -> _Tilted:
    """Convolve the losses of different plans, on the coarsest grid of them."""
    if len(parts) == 1:
        return parts[0]
    spacing = max(part.spacing for part in parts)
    coarse = [(_coarsened(part, spacing, tilt), 1) for part in parts]
    first = sum(float(part.points[0]) for part, _ in coarse)
    last = sum(float(part.points[-1]) for part, _ in coarse)
    return _convolved(coarse, first * spacing, last * spacing)


def _coarsened(part: _Tilted, spacing: float, tilt: float) -> _Tilted:
    """Move masses to the multiples of a coarser spacing around them."""
    ratio = round(spacing / part.spacing)
    if ratio == 1:
        return part
    padded = np.zeros(len(part.masses) + 2 * ratio)
    begin = int(part.points[0]) % ratio
    padded[begin : begin + len(part.masses)] = part.masses
    start = int(part.points[0]) // ratio
    rows = padded[: len(padded) // ratio * ratio].reshape(-1, ratio)
    beyond = np.arange(ratio) * part.spacing
    share = np.expm1(-beyond) / math.expm1(-spacing)
    up = share * np.exp(tilt * (spacing - beyond))
    down = (1 - share) * np.exp(-tilt * beyond)
    masses = np.append(rows @ down, 0.0) + np.append(0.0, rows @ up)
    error = part.error * float(up.sum() + down.sum())
    points = start + np.arange(len(masses))
    return _Tilted(spacing, points, masses, error, part.missing)


def _solve(
    total: _Tilted, moment: float, tilt: float, log_delta: float, start: float
) -> float:
    """Find the least epsilon with delta(epsilon) <= delta, from one that has it."""
    losses = total.points * total.spacing

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
