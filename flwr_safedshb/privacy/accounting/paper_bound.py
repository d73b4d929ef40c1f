r"""Evaluate the paper's exact privacy theorem at its best Renyi order.

eps* = inf over alpha > 1 of T eps_1(alpha) + log(1/delta)/(alpha - 1). Between integer
orders (alpha - 1) eps_1(alpha) is linear, so the objective is monotone there and the
infimum is over integers alone, where eps_1(a) = eps'(a):

eps'(a) = log(1 + r^2 C(a,2) min{4(e^eps(2) - 1), 2e^eps(2)} + 2 sum_{j=3..a} t_j)
          / (a - 1), t_j = r^j C(a,j) e^((j-1) eps(j)), eps(j) = j/(2 s^2), r = b/m.

Every order gives a valid epsilon. With much noise the best one is in the thousands;
orders above 2^18 are left out, which only matters where epsilon is below 1e-4.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from scipy.special import logsumexp

# The ratio of adjacent orders on the grid that brackets the best one.
_RATIO = 1.15
# Beyond a r = 64 the sum alone costs more than the best order does.
_LARGEST = 64.0
_MAX_ORDER = 1 << 18


def minimize_epsilon(
    noise_multiplier: float, rate: float, steps: int, delta: float
) -> float:
    """Return eps* of T = `steps` steps with noise multiplier s and sampling rate r."""

    @cache
    def compute_objective(order: int) -> float:
        divergence = compute_divergence(order, noise_multiplier, rate)
        return steps * divergence + math.log(1 / delta) / (order - 1)

    orders = [2]
    while orders[-1] < min(max(1024.0, _LARGEST / rate), _MAX_ORDER):
        orders.append(max(orders[-1] + 1, math.floor(orders[-1] * _RATIO)))
    best = min(range(len(orders)), key=lambda i: compute_objective(orders[i]))
    low, high = orders[max(best - 1, 0)], orders[min(best + 1, len(orders) - 1)]
    while high - low > 2:
        left, right = low + (high - low) // 3, high - (high - low) // 3
        if compute_objective(left) <= compute_objective(right):
            high = right
        else:
            low = left
    candidates = (*range(low, high + 1), orders[best])
    return min(compute_objective(order) for order in candidates)


def compute_divergence(order: int, noise_multiplier: float, rate: float) -> float:
    """Return the Renyi divergence eps'(a) of one step; infinite if it overflows.

    Parameters
    ----------
    order : int
        a, at least 2.
    noise_multiplier, rate : float
        s and r.
    """
    growth = noise_multiplier**-2
    # log min{4 (e^eps(2) - 1), 2 e^eps(2)}, safe from overflow
    factor = min(
        math.log(4) + growth + math.log(-math.expm1(-growth)), math.log(2) + growth
    )
    pairs = math.log(order) + math.log(order - 1) - math.log(2)
    logs = [0.0, 2 * math.log(rate) + pairs + factor]
    if order >= 3:
        log_rate = math.log(rate)
        binomial = sum(math.log((order - i) / (i + 1)) for i in range(3))
        first = binomial + 3 * log_rate + 3 * growth  # log t_3
        j = np.arange(3.0, order)
        ratios = np.log((order - j) / (j + 1)) + log_rate + j * growth  # t_{j+1}/t_j
        log_terms = np.cumsum(np.concatenate([[first], ratios]))
        logs.append(math.log(2) + float(logsumexp(log_terms)))
    total = float(logsumexp(logs))
    return total / (order - 1) if total < math.inf else math.inf
