"""Bound the norm of an honest reply, where clip norm and noise are public.

Claim. With probability at least `confidence`, no honest node of a run ever sends a
reply whose norm exceeds `reply_norm`, whatever adversaries do. So a larger norm proves
an adversary.

Proof. A private gradient is g = a + z + lambda theta. Here a is a sum of gradients that
are clipped at C, divided by b: of a batch of k examples |a| <= C k / b, and k = b
unless batches are Poisson. z ~ N(0, s^2 I_d) with s <= `noise_std`. The norm is
1-Lipschitz and E|z| <= s sqrt(d), so by Gaussian concentration, for L = ln(1/q),

    P(|z| > s (sqrt(d) + sqrt(2 L))) <= q.

A Poisson batch is binomial with mean b and variance at most b; by Bernstein's
inequality

    P(k > b + t) <= q   for   t = L/3 + sqrt(L^2/9 + 2 b L),

and t / b falls with b, so the smallest b counts. Each draw has fresh randomness, so
both hold whatever happened before. With q = p_t / (n_t K), half of it for each of the
two where there are two, summing over the rounds t, their n_t nodes and K local steps
bounds the probability that any draw of the run breaks its inequality by the sum of p_t,
which `risk_in_round` makes at most 1 - confidence.

If none does, |g| <= C k / b + s (sqrt(d) + sqrt(2 L)) + lambda |theta| for all of them.
A momentum starts at 0 and m_t = beta m_{t-1} + (1 - beta) g_t is a convex combination
of 0 and the gradients so far, so the largest bound so far holds for it, and for the
mean of K momentums. Between local steps theta moves by gamma m, so |theta| grows by at
most gamma times that bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

# Room for the rounding of float32.
_SLACK = 1.001


@dataclass(frozen=True)
class NormBound:
    """The public figures that bound the norm of an honest reply.

    Parameters
    ----------
    clip_norm : float
        C, the largest of all nodes.
    noise_std : float
        sigma_DP, the largest of all nodes (`PrivacyPlan.noise_std`).
    weight_decay : float
        lambda, the largest of all nodes.
    poisson_batch_size : int, optional
        b, the smallest of the nodes with Poisson sampling. By default no node has it,
        and every batch has b examples.
    confidence : float
        The probability that no honest reply of a whole run is longer than the bound.
    """

    clip_norm: float
    noise_std: float
    weight_decay: float = 0.0
    poisson_batch_size: int | None = None
    confidence: float = 1.0 - 1e-6

    def __post_init__(self) -> None:
        if not 0.0 < self.clip_norm < math.inf:
            raise ValueError(
                f"clip_norm={self.clip_norm} must be finite and above 0; give the "
                "largest of the nodes' plans"
            )
        for name in ("noise_std", "weight_decay"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be finite and at least 0; give "
                    "the largest of the nodes"
                )
        if self.poisson_batch_size is not None and self.poisson_batch_size < 1:
            raise ValueError(
                f"poisson_batch_size={self.poisson_batch_size} must be at least 1; "
                "leave it out if no node has Poisson sampling"
            )
        if not 0.0 < self.confidence < 1.0:
            raise ValueError(f"confidence={self.confidence} must lie in (0, 1)")

    def gradient_norm(self, size: int, risk: Fraction) -> float:
        """Bound the norm of one private gradient without its weight decay.

        Parameters
        ----------
        size : int
            d.
        risk : Fraction
            q, the probability that the gradient is longer.
        """
        clipped, log_risk = self.clip_norm, math.log(1 / risk)
        if self.poisson_batch_size is not None:
            log_risk += math.log(2.0)
            b = self.poisson_batch_size
            above = log_risk / 3 + math.sqrt(log_risk**2 / 9 + 2 * b * log_risk)
            clipped *= 1.0 + above / b
        noise = self.noise_std * (math.sqrt(size) + math.sqrt(2.0 * log_risk))
        return _SLACK * (clipped + noise)

    def reply_norm(
        self,
        gradient_norm: float,
        before: float,
        weights_norm: float,
        learning_rate: float,
        local_steps: int,
    ) -> float:
        """Bound the norm of an honest reply.

        Parameters
        ----------
        gradient_norm : float
            See `gradient_norm`.
        before : float
            The bound of the round before, which holds for the momentum that a node
            starts from; 0 in the first round.
        weights_norm : float
            |theta_t|.
        learning_rate, local_steps : float, int
            gamma and K.
        """
        longest = before
        for _ in range(local_steps if self.weight_decay else 1):
            decay = _SLACK * self.weight_decay * weights_norm
            longest = max(longest, gradient_norm + decay)
            weights_norm += learning_rate * longest
        return longest
