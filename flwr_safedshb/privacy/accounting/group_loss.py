"""The privacy loss of one fixed-size step about a group of examples.

k of the m examples are exchanged for any others, and J of them are among the b that are
drawn: h_j = P(J = j) is hypergeometric. Given J = j, the two datasets release P_j and
Q_j, and P_0 = Q_0. All of them come from one draw: of the batch with j exchanged
examples one more follows by putting another exchanged one in the place of one of the
others. So, in units of 2C/b, the means of P_j and Q_i are at most max(i, j) apart.

For A = e^epsilon >= 1 the hockey-stick divergence is the integral of the positive part
of sum_j h_j P_j - A sum_i h_i Q_i, where P_0 = Q_0 leaves (A - 1) h_0 Q_0. Let b_j be
numbers with

    b_j >= A for j >= 1,  and  sum over j >= 1 of h_j b_j = A - h_0.

Then the mass A h_i of each Q_i, and (A - 1) h_0 of Q_0, can be shared out so that P_j
gets h_j b_j of those with i <= j alone, because for every i the P_j with j >= i ask for
at least what the Q_j with j >= i have. Within such a share the means are at most j
apart, and (x + y)_+ <= x_+ + y_+. So the divergence is at most

    delta(A) = sum over j >= 1 of h_j H_{b_j}(N(j, s^2) || N(0, s^2)).

Here b_j = max(A, e^{(j x - j^2/2) / s^2}), for the x that meets the sum: the choice
that is best for examples of opposite gradients, but where it would be below A. The same
holds with the datasets exchanged, which bounds A < 1. For k = 1 it is the bound of a
single example.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr, logsumexp

from flwr_safedshb.privacy.samplers import GroupPair

Floats = npt.NDArray[np.float64]

_BISECTIONS = 80
# In standard deviations: beyond it the divergence is taken for zero.
_REACH = 20.0


def compute_divergences(pair: GroupPair, losses: Floats) -> Floats:
    """Return delta(e^epsilon) for epsilons of at least 0, (k,)."""
    counts, log_weights = _list_drawn(pair)
    variance = pair.std**2
    epsilons = losses[:, None]

    def compute_ratios(x: Floats) -> Floats:
        """Return log b_j, (k, j)."""
        return np.maximum((counts * x - counts**2 / 2) / variance, epsilons)

    # The log of A - h_0, and x by bisection; a smaller x only makes delta larger.
    wanted = losses + np.log1p(-pair.weights[0] * np.exp(-losses))
    low = np.zeros_like(epsilons)
    high = np.full_like(epsilons, find_greatest_loss(pair) * variance + counts[-1])
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        below = logsumexp(log_weights + compute_ratios(middle), axis=1) <= wanted
        low = np.where(below[:, None], middle, low)
        high = np.where(below[:, None], high, middle)
    ratios = compute_ratios(low)
    thresholds = ratios * variance / counts + counts / 2
    reached = np.exp(log_weights + log_ndtr((counts - thresholds) / pair.std))
    paid = np.exp(log_weights + ratios + log_ndtr(-thresholds / pair.std))
    found: Floats = np.maximum(reached - paid, 0.0).sum(axis=1)
    return found


def find_greatest_loss(pair: GroupPair) -> float:
    """Return a loss whose divergence is taken for zero."""
    most = float(_list_drawn(pair)[0][-1])
    return most * (most / 2 + _REACH * pair.std) / pair.std**2


def compute_typical_loss(pair: GroupPair) -> float:
    """Return the expected number drawn times the typical loss of one, sqrt(log E[e^L]).

    It decides about the spacing of a grid, and about no bound.
    """
    mean = float(np.dot(pair.weights, np.arange(len(pair.weights))))
    exponent = min(1.0 / pair.std**2, 700.0)
    return math.sqrt(math.log1p(mean**2 * math.expm1(exponent)))


def _list_drawn(pair: GroupPair) -> tuple[Floats, Floats]:
    """Return the numbers j >= 1 that can be drawn, and log h_j."""
    weights = np.array(pair.weights)
    drawn = np.flatnonzero(weights[1:]) + 1
    return drawn.astype(np.float64), np.log(weights[drawn])
