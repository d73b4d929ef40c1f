"""Discretize the privacy loss distribution of one step, pessimistically.

A step that releases x has the privacy loss log(P(x) / Q(x)). Its distribution is put on
multiples of a spacing h ("connect the dots": Doroshenko, Ghazi, Kamath, Kumar,
Manurangsi, "Connect the Dots: Tighter Discrete Approximations of Privacy Loss
Distributions", PoPETs 2022): the mass between two points is split between them so
that its probability under P and under Q stays the same. Of all distributions with these
two probabilities this one has the largest delta, so the grid never underestimates it.

Numerics, all on the pessimistic side
-------------------------------------
- Points are multiples of h near 0 and farther apart where losses are large: the next
  one is never farther than a 512th of the loss. With h a power of two, the points of a
  coarser grid are points of the finer one.
- Probabilities are integrals of positive functions over short intervals, by Gauss's
  rule, with a relative error of some 1e-14; each is raised by 1e-12.
- Losses are right to a few units in the last place; `slack` bounds their error.
- Outputs beyond 20 deviations are left out: at most 1e-88 of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from flwr_safedshb.privacy.accounting.group_loss import (
    compute_divergences,
    compute_typical_loss,
    find_greatest_loss,
)
from flwr_safedshb.privacy.samplers import (
    DominatingPair,
    GroupPair,
    Mixture,
    MixturePair,
)

Pair = DominatingPair | GroupPair

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

# Grid points in an octave of losses.
_POINTS = 512
# In standard deviations: how far out the outputs are integrated, and the length of an
# interval of the quadrature.
_REACH = 20.0
_PIECE = 0.125
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
# Each probability is multiplied by it, to cover the error of the quadrature.
_RAISED = 1.0 + 1e-12
_BISECTIONS = 60
# For groups, whose masses are differences of divergences.
_GROUP_RAISED = 1.0 + 1e-9

# Orders of the moments of the loss, three in an octave, both signs and 0.
POSITIVE_ORDERS: Floats = 2.0 ** np.arange(-12, 24, 1 / 3)
ORDERS: Floats = np.concatenate([-POSITIVE_ORDERS[::-1], [0.0], POSITIVE_ORDERS])


@dataclass(frozen=True)
class LossDistribution:
    """Distribution of the loss of one step.

    Attributes
    ----------
    spacing : float
        h, a power of two.
    points : ndarray of int64, shape (k,)
        Where there is mass, in multiples of ``spacing``; distinct and increasing.
    masses : ndarray, shape (k,)
        Probabilities under P.
    slack : float
        Bound on how much larger a loss may be than the grid says.
    """

    spacing: float
    points: Integers
    masses: Floats
    slack: float


def _log_sum_exp(exponents: Floats) -> float:
    largest = exponents.max()
    return float(largest + np.log(np.exp(exponents - largest).sum()))


@lru_cache(maxsize=32)
def discretize_step(pair: Pair, spacing: float, tail_exponent: int) -> LossDistribution:
    """Return the loss distribution of one step, truncated at large losses.

    Parameters
    ----------
    spacing : float
        A power of two.
    tail_exponent : int
        At most 2^-tail_exponent of the mass, at the largest losses, is truncated;
        delta has to pay for it.
    """
    whole = _discretize_whole_step(pair, spacing)
    above = np.cumsum(whole.masses[::-1])[::-1]
    kept = int(np.searchsorted(-above, -(2.0**-tail_exponent)))
    return LossDistribution(
        spacing, whole.points[:kept], whole.masses[:kept], whole.slack
    )


@lru_cache(maxsize=8192)
def compute_log_moments(
    pair: Pair, spacing: float, tail_exponent: int
) -> tuple[Floats, float]:
    """Return log E[e^(r L)] for every r of ``ORDERS``, and the slack of L.

    L is the loss of `discretize_step` under P. The cache is large, because every charge
    of a ledger computes the moments of all its plans.
    """
    step = discretize_step(pair, spacing, tail_exponent)
    logarithms = np.log(step.masses)
    losses = step.points * spacing
    logs = np.array([_log_sum_exp(logarithms + order * losses) for order in ORDERS])
    logs.setflags(write=False)
    return logs, step.slack


@lru_cache(maxsize=16)
def _discretize_whole_step(pair: Pair, spacing: float) -> LossDistribution:
    """Return the loss distribution of one step on multiples of ``spacing``."""
    if isinstance(pair, GroupPair):
        return _discretize_group(pair, spacing)
    # Positive and negative losses have a dominating pair of their own; 0 is a point.
    above, below = _LossFunction(pair.above), _LossFunction(pair.below)
    points = _make_points(below.least / spacing, above.greatest / spacing)
    losses: Floats = np.multiply(points, spacing, dtype=np.float64)
    masses = np.zeros(len(points))
    zero = int(np.searchsorted(points, 0))
    _distribute_mass(above, losses[zero:], masses[zero:])
    _distribute_mass(below, losses[: zero + 1], masses[: zero + 1])
    # The rest of the mass has loss 0: there the two distributions agree.
    masses[zero] += max(0.0, 1.0 - masses.sum())
    there = masses > 0
    largest = max(abs(below.least), abs(above.greatest))
    slack = 8 * np.finfo(float).eps * (1.0 + largest)
    return LossDistribution(spacing, points[there], masses[there] * _RAISED, slack)


def _discretize_group(pair: GroupPair, spacing: float) -> LossDistribution:
    """Return the loss distribution that has a group's divergence at every point.

    A divergence is convex in e^epsilon, so between two points it is at most on the line
    between them. The distribution whose divergence has these lines has a mass at each
    point: e^epsilon times the difference of the slopes. That of -epsilon is e^-epsilon
    times it, because the datasets may be exchanged.
    """
    points = _make_points(0.0, find_greatest_loss(pair) / spacing)
    points = points[points >= 0]
    losses: Floats = np.multiply(points, spacing, dtype=np.float64)
    falls = -np.diff(compute_divergences(pair, losses), append=0.0)
    steps = np.diff(losses)
    upper = np.append(falls[:-1] / np.expm1(steps), 0.0)[1:]
    masses = np.maximum(falls[:-1] / -np.expm1(-steps) - upper, 0.0)
    lower = masses * np.exp(-losses[1:])
    rest = max(0.0, 1.0 - masses.sum() - lower.sum())
    points = np.concatenate([-points[:0:-1], points])
    masses = np.concatenate([lower[::-1], [rest], masses])
    there = masses > 0
    slack = 8 * np.finfo(float).eps * (1.0 + float(losses[-1]))
    raised = masses[there] * _GROUP_RAISED
    return LossDistribution(spacing, points[there], raised, slack)


@lru_cache(maxsize=8192)
def measure_scales(pair: Pair) -> tuple[float, float]:
    """Return the typical loss of one step, sqrt(log E[e^L]), and the largest, max |L|.

    E[e^L] gives a divergence, so it is no larger for a step that the pair dominates.
    """
    if isinstance(pair, GroupPair):
        return compute_typical_loss(pair), find_greatest_loss(pair)
    loss = _LossFunction(pair.above)
    x, weights = loss.place_nodes(loss.find_breaks())
    exponents = np.log(loss.compute_density(x) * weights + 1e-300) + loss(x)
    typical = float(np.sqrt(max(_log_sum_exp(exponents.ravel()), 1e-30)))
    return typical, max(loss.greatest, -_LossFunction(pair.below).least)


class _LossFunction:
    """The privacy loss as a function of the output x, log(top(x) / bottom(x))."""

    def __init__(self, pair: MixturePair) -> None:
        self._pair = pair
        means = [mean for _, mean in (*pair.top, *pair.bottom)]
        self._left = min(means) - _REACH * pair.std
        self._right = max(means) + _REACH * pair.std
        ends = self(np.array([self._left, self._right]))
        self.least, self.greatest = float(ends[0]), float(ends[1])

    def __call__(self, x: Floats) -> Floats:
        return self._compute_log(self._pair.top, x) - self._compute_log(
            self._pair.bottom, x
        )

    def _compute_log(self, mixture: Mixture, x: Floats) -> Floats:
        """Return log of the mixture over N(0, std^2)."""
        scale = self._pair.std**-2
        parts = [
            (weight, (2 * x - mean) * (0.5 * mean * scale))
            for weight, mean in mixture
            if weight > 0
        ]
        largest = np.maximum.reduce([exponent for _, exponent in parts])
        total = sum(weight * np.exp(exponent - largest) for weight, exponent in parts)
        logarithm: Floats = largest + np.log(total)
        return logarithm

    def compute_density(self, x: Floats) -> Floats:
        """Return the density of the output under P."""
        std = self._pair.std
        total = sum(
            weight * np.exp(-0.5 * ((x - mean) / std) ** 2)
            for weight, mean in self._pair.top
        )
        density: Floats = total / (std * np.sqrt(2 * np.pi))
        return density

    def find_breaks(self) -> Floats:
        """Return the ends of intervals that are short enough for the quadrature.

        A gap between two means that are far apart is one interval: it has a mass below
        e^-200.
        """
        around = np.arange(-_REACH, _REACH + _PIECE, _PIECE) * self._pair.std
        near = np.add.outer([mean for _, mean in self._pair.top], around).ravel()
        return np.union1d(near, [self._left, self._right])

    def invert(self, losses: Floats) -> Floats:
        """Return the outputs with these losses by bisection, clamped to the ends."""
        low = np.full_like(losses, self._left)
        high = np.full_like(losses, self._right)
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            below = self(middle) < losses
            low = np.where(below, middle, low)
            high = np.where(below, high, middle)
        return 0.5 * (low + high)

    def place_nodes(self, breaks: Floats) -> tuple[Floats, Floats]:
        """Return Gauss-Legendre nodes and weights between breaks, both (k, 8)."""
        half = np.diff(breaks)[:, None] / 2
        middle = breaks[:-1, None] + half
        return middle + half * _NODES, half * _WEIGHTS


def _distribute_mass(loss: _LossFunction, points: Floats, masses: Floats) -> None:
    """Add the mass between the first and the last point to `masses`, in place."""
    inner = loss.invert(points)
    breaks = loss.find_breaks()
    between = (breaks > inner[0]) & (breaks < inner[-1])
    breaks = np.union1d(inner, breaks[between])
    x, weights = loss.place_nodes(breaks)
    # The index of the point below each interval.
    lower = np.searchsorted(inner, 0.5 * (breaks[1:] + breaks[:-1])) - 1
    lower = np.clip(lower, 0, len(points) - 2)
    width = np.diff(points)[lower]
    probability = loss.compute_density(x) * weights
    # The upper point's share keeps the probability under Q, e^-L times that under P.
    share = np.clip(np.expm1(points[lower, None] - loss(x)), -1.0, 0.0)
    share /= np.expm1(-width)[:, None]
    up = (np.minimum(share, 1.0) * probability).sum(axis=1)
    np.add.at(masses, lower + 1, up)
    np.add.at(masses, lower, np.maximum(probability.sum(axis=1) - up, 0.0))


def _make_points(least: float, greatest: float) -> Integers:
    """Return grid points from below ``least`` to above ``greatest``, 0 among them."""
    octaves = max(1, int(np.ceil(np.log2(max(-least, greatest, 2.0)))) + 1)
    positive = np.unique(
        np.concatenate(
            [np.arange(2 * _POINTS)]
            + [
                2**octave + 2 ** (octave - 9) * np.arange(_POINTS + 1)
                for octave in range(10, octaves + 1)
            ]
        )
    )
    upper = positive[: np.searchsorted(positive, max(greatest, 1.0)) + 1]
    lower = positive[: np.searchsorted(positive, max(-least, 1.0)) + 1]
    return np.concatenate([-lower[:0:-1], upper])
