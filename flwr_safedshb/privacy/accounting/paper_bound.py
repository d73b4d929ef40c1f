r"""The paper's exact privacy theorem, evaluated at its best Renyi order.

eps* = inf over alpha > 1 of T eps_1(alpha) + log(1/delta)/(alpha - 1). Between integer
orders (alpha - 1) eps_1(alpha) is linear, so the objective is monotone there and the
infimum is over integers alone:

eps'(a) = log(1 + r^2 C(a,2) min{4(e^eps(2) - 1), 2e^eps(2)} + 2 sum_{j=3..a} t_j)
          / (a - 1), t_j = r^j C(a,j) e^((j-1) eps(j)), eps(j) = j/(2 s^2), r = b/m.

With much noise the best order is in the thousands, or in the millions for small r. So
the middle of a long sum is bounded by its largest term: log t_j is
first concave in j, then convex, then concave again, because its steps
D_j = log((a-j) r/(j+1)) + j/s^2 have the derivative 1/s^2 - (a+1)/((a-j)(j+1)).
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammaln, logsumexp

# The most terms that are all added up; of a longer sum only both ends are.
_TERMS = 1 << 14
_END = 1 << 12
# Ratio of neighbours on the grid of orders that brackets the best one.
_RATIO = 1.15
# Beyond a r = 64 the sum alone costs more than the best order does.
_LARGEST = 64.0


def minimize_epsilon(
    noise_multiplier: float, rate: float, steps: int, delta: float
) -> float:
    """Return eps* of so many steps with noise s and sampling rate r."""

    @cache
    def compute_objective(order: int) -> float:
        divergence = bound_divergence(order, noise_multiplier, rate)
        return steps * divergence + math.log(1 / delta) / (order - 1)

    orders = [2]
    while orders[-1] < max(1024.0, _LARGEST / rate):
        orders.append(max(orders[-1] + 1, math.floor(orders[-1] * _RATIO)))
    best = min(range(len(orders)), key=lambda i: compute_objective(orders[i]))
    low, high = orders[max(best - 1, 0)], orders[min(best + 1, len(orders) - 1)]
    while high - low > 2:
        left, right = low + (high - low) // 3, high - (high - low) // 3
        if compute_objective(left) <= compute_objective(right):
            high = right
        else:
            low = left
    return min(
        compute_objective(order) for order in (*range(low, high + 1), orders[best])
    )


def bound_divergence(order: int, noise_multiplier: float, rate: float) -> float:
    """Return eps'(a), or for a large a a bound above it; infinite where it overflows.

    Parameters
    ----------
    order : int
        a, at least 2.
    noise_multiplier, rate : float
        s and r.
    """
    eps2 = noise_multiplier**-2
    # log min{4 (e^eps(2) - 1), 2 e^eps(2)}, safe from overflow
    factor = min(math.log(4) + eps2 + math.log(-math.expm1(-eps2)), math.log(2) + eps2)
    pairs = math.log(order) + math.log(order - 1) - math.log(2)
    logs = [0.0, 2 * math.log(rate) + pairs + factor]
    if order >= 3:
        logs.append(math.log(2) + _bound_log_sum(order, noise_multiplier, rate))
    total = float(logsumexp(logs))
    return total / (order - 1) if total < math.inf else math.inf


def _bound_log_sum(order: int, noise_multiplier: float, rate: float) -> float:
    """Return the logarithm of the sum of t_j over j = 3..a, or of a bound on it."""
    log_rate, growth = math.log(rate), noise_multiplier**-2

    def compute_ascent(j: np.ndarray) -> np.ndarray:  # D_j
        ascent: np.ndarray = np.log((order - j) / (j + 1)) + log_rate + j * growth
        return ascent

    count = order - 2 if order <= _TERMS else _END
    binomial = sum(math.log((order - i) / (i + 1)) for i in range(3))
    first = binomial + 3 * log_rate + 3 * growth
    head = np.cumsum([first, *compute_ascent(np.arange(3.0, 2.0 + count))])
    if order <= _TERMS:
        return float(logsumexp(head))
    last = order * log_rate + order * (order - 1.0) * growth / 2
    tail = np.cumsum(
        [last, *-compute_ascent(np.arange(order - 1.0, order - count, -1.0))]
    )
    near, far = 2.0 + count, order - count + 1.0
    if float(compute_ascent(np.array(near))) >= 0.0:
        return math.inf
    largest = max(float(head[-1]), float(tail[-1]))
    # From `near` on they fall, until log t_j is convex; then it is concave once more.
    inside = (order + 1.0) ** 2 - 4.0 * (order + 1.0) / growth
    begin = (order - 1.0 + math.sqrt(inside)) / 2.0 if inside > 0.0 else far
    if begin < far and compute_ascent(np.array(begin)) > 0.0 > compute_ascent(
        np.array(far)
    ):
        largest = max(largest, _bound_peak(order, log_rate, growth, begin, far))
    return float(logsumexp([*head, *tail, math.log(order) + largest]))


def _bound_peak(
    order: int, log_rate: float, growth: float, low: float, high: float
) -> float:
    """Return a bound on log t_j between two numbers, where it is concave in j."""
    peak = brentq(
        lambda j: math.log((order - j) / (j + 1)) + log_rate + j * growth, low, high
    )
    # Within one step of it, and up to the round-off of the binomial coefficient.
    j = float(np.clip(peak, low, high))
    every = float(gammaln(order + 1.0))
    binomial = every - float(gammaln(j + 1.0) + gammaln(order - j + 1.0))
    return binomial + j * log_rate + j * (j - 1) * growth / 2 + 1.0 + 1e-14 * every
