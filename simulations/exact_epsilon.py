"""Epsilon computed in another way than the product does, to hold it against.

No grid of losses and no Fourier transform of one. With the privacy loss L of all steps
together and K(z) = log E[e^(zL)], for any r > 0

    delta(eps) = E[max(0, 1 - e^(eps-L))]
               = 1/(2 pi i) * integral of e^(K(z) - z eps) / (z (z+1)) dz

over the line Re z = r, since 1/(z (z+1)) is the Laplace transform of 1 - e^-y. K is T
times that of one step, an integral over outputs by Gauss's rule. On a line near the
saddle point of the integrand the result is right in relative terms, however small delta
is. Without sampling there is a closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

Floats = npt.NDArray[np.floating]
Complexes = npt.NDArray[np.complexfloating]
Kind = Literal["fixed", "poisson-replace", "poisson-remove", "poisson-add"]

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(10)
_REACH, _PIECE = 16.0, 0.0625
# e^-36 is left out where an integral is cut off.
_SMALL = 36.0
_NEGLIGIBLE = 60.0
_BLOCK = 64
# Blocks after which an integral is given up: it would take minutes.
_BLOCKS = 120
# Radians that a wave may turn between two breaks, for Gauss's rule to see it.
_TURN = 8.0


@dataclass(frozen=True)
class Outcomes:
    """Losses of one step and the logarithms of their probabilities, as nodes."""

    losses: Floats
    logs: Floats

    @property
    def widest(self) -> float:
        """Return the widest range of losses between two breaks that matter."""
        smooth = len(self.losses) // len(_NODES) * len(_NODES)
        pieces = self.losses[:smooth].reshape(-1, len(_NODES))
        matter = self.logs[:smooth].reshape(-1, len(_NODES)).max(axis=1) > -_SMALL
        return float(np.ptp(pieces, axis=1)[matter].max())

    def near(self, order: float) -> Outcomes:
        """Leave out what is negligible in the moments of ``order``."""
        weights = self.logs + order * self.losses
        kept = weights > weights.max() - _NEGLIGIBLE
        return Outcomes(self.losses[kept], self.logs[kept])

    def moment(self, z: Complexes) -> Complexes:
        """Return log E[e^(z L)], of shape (k,), for z of shape (k,)."""
        exponents = self.logs + z.real[:, None] * self.losses
        largest = exponents.max(axis=1)
        sizes = np.exp(exponents - largest[:, None])
        waves = np.exp(1j * z.imag[:, None] * self.losses)
        return np.asarray(largest + np.log((sizes * waves).sum(axis=1)))


def outcomes(kind: Kind, noise: float, rate: float) -> Outcomes:
    """Return the loss of one step that draws an example with probability ``rate``.

    Parameters
    ----------
    kind : str
        Sampler and, of Poisson's, what happens to the example.
    noise : float
        Noise multiplier of a plan, in units of 2C/b.
    """
    if kind == "fixed":  # the example takes the place of another: 2C/b apart
        x, weights = _nodes(0.5, 1.0 + _REACH * noise, noise)
        ratio = _log_mixture(x, rate, 1.0, noise)
        out = np.log(weights) + _log_normal(x, noise)
        # From 1/2 on the loss is positive one way, and negative the other way.
        losses = np.concatenate([ratio, -ratio, [0.0]])
        logs = np.concatenate([out + ratio, out])
        rest = math.log1p(-float(np.exp(logs).sum()))
        return Outcomes(losses, np.append(logs, rest))
    std = 2 * noise  # the example alone moves the mean by C/b
    x, weights = _nodes(-1.0 - _REACH * std, 1.0 + _REACH * std, std)
    out = np.log(weights) + _log_normal(x, std)
    one, other = (_log_mixture(x, rate, mean, std) for mean in (1.0, -1.0))
    if kind == "poisson-replace":
        return Outcomes(one - other, out + one)
    return Outcomes(one, out + one) if kind == "poisson-remove" else Outcomes(-one, out)


def _nodes(left: float, right: float, std: float) -> tuple[Floats, Floats]:
    breaks = np.linspace(left, right, math.ceil((right - left) / (_PIECE * std)) + 1)
    half = np.diff(breaks)[:, None] / 2
    return (breaks[:-1, None] + half + half * _NODES).ravel(), (half * _WEIGHTS).ravel()


def _log_normal(x: Floats, std: float) -> Floats:
    return np.asarray(-0.5 * (x / std) ** 2 - math.log(std * math.sqrt(2 * math.pi)))


def _log_mixture(x: Floats, rate: float, mean: float, std: float) -> Floats:
    """Return log of (1-q) N(0) + q N(mean) over N(0)."""
    if rate == 0.0:
        return np.zeros_like(x)
    moved = math.log(rate) + (2 * x - mean) * mean / (2 * std**2)
    stayed = math.log1p(-rate) if rate < 1 else -math.inf
    return np.asarray(np.logaddexp(stayed, moved))


def exact_epsilon(
    kind: Kind, noise: float, rate: float, steps: int, delta: float
) -> float:
    """Return epsilon of ``steps`` (T), right to some six digits."""
    if rate == 1.0:
        scale = 2 if kind in ("poisson-remove", "poisson-add") else 1
        return gaussian_epsilon(math.sqrt(steps) / (scale * noise), delta)
    if steps == 1:
        return _single_epsilon(kind, noise, rate, delta)
    return _inverted_epsilon(outcomes(kind, noise, rate), steps, delta)


def gaussian_epsilon(shift: float, delta: float) -> float:
    """Return epsilon of N(shift, 1) against N(0, 1), which T full batches come to."""

    def excess(eps: float) -> float:
        one = log_ndtr(shift / 2 - eps / shift)
        other = eps + log_ndtr(-shift / 2 - eps / shift)
        return float(one + np.log(-np.expm1(other - one)) - math.log(delta))

    return _root(excess, shift**2 / 2 + shift * math.sqrt(2 * math.log(1 / delta)) + 1)


def _single_epsilon(kind: Kind, noise: float, rate: float, delta: float) -> float:
    """Return epsilon of one step: the outputs beyond one threshold are the event."""
    std = noise if kind == "fixed" else 2 * noise
    other = rate if kind == "poisson-replace" else 0.0
    rates = (0.0, rate) if kind == "poisson-add" else (rate, other)

    def log_ratio(x: float) -> float:
        at = np.array([x])
        return float(_log_mixture(at, rates[0], 1.0, std)[0]) - float(
            _log_mixture(at, rates[1], -1.0, std)[0]
        )

    def excess(eps: float) -> float:
        if log_ratio(1.0 + 60 * std) <= eps:
            return -1.0  # the loss of an added example is bounded
        x = brentq(lambda x: log_ratio(x) - eps, -1 - 60 * std, 1 + 60 * std)
        with_it, without = (
            (1 - share) * ndtr(-x / std) + share * ndtr((mean - x) / std)
            for share, mean in zip(rates, (1.0, -1.0), strict=True)
        )
        return float(with_it - math.exp(eps) * without) / delta - 1.0

    return _root(excess, 2.0)


def _inverted_epsilon(one: Outcomes, steps: int, delta: float) -> float:
    orders = 2.0 ** np.arange(-10, 22, 0.125)
    moments = steps * one.moment(orders.astype(complex)).real
    bounds = (moments - math.log(delta) - np.log1p(orders)) / orders
    best = int(np.argmin(bounds))
    # A little below the best order, where the integrand falls off to both sides.
    r, most = 0.9 * float(orders[best]), float(bounds[best])
    spread = math.sqrt(max(np.gradient(np.gradient(moments, orders), orders)[best], 0))
    step = 2 * math.pi / (2 * _SMALL / r + 4 * _SMALL / (1 + r) + 40 * spread)
    start = steps * complex(one.moment(np.array([r + 0j]))[0])
    values: list[Complexes] = []
    widest, nearby = one.widest, one.near(r)
    while not values or np.abs(values[-1]).max() > 1e-13 * np.abs(values[0][0]):
        t = step * (len(values) * _BLOCK + np.arange(_BLOCK))
        if t[-1] * widest > _TURN or len(values) == _BLOCKS:
            raise ArithmeticError("the integral ends after its waves can be seen")
        z = r + 1j * t
        values.append(np.exp(steps * nearby.moment(z) - start) / (z * (z + 1)))
    terms = np.concatenate(values)
    terms[0] /= 2
    t = step * np.arange(len(terms))
    excess = partial(_inverted_excess, terms, t, step, r, start.real, delta)
    return _root(excess, max(most, 1e-12))


def _inverted_excess(
    terms: Complexes,
    t: Floats,
    step: float,
    r: float,
    moment: float,
    delta: float,
    eps: float,
) -> float:
    total = float((terms * np.exp(-1j * t * eps)).real.sum()) * step / math.pi
    return math.exp(moment - r * eps - math.log(delta)) * total - 1.0


def _root(excess: Callable[[float], float], upper: float) -> float:
    if excess(0.0) <= 0:
        return 0.0
    while excess(upper) > 0:
        upper *= 1.5
    return float(brentq(excess, 0.0, upper, xtol=1e-15, rtol=1e-12))
