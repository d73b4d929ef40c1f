r"""Whether a training has a chance against its noise, from public numbers alone.

In every step each of h honest nodes adds noise of standard deviation sigma to each of d
weights of a mean gradient whose norm is at most C. Over T steps gradients add up to a
vector of norm C T at most, if all of them point the same way, and the mean of the
nodes' noise to one of norm sigma sqrt(d T/h). Two things decide what that means.

**The noise load.** Neither learning rate nor momentum changes the ratio of the two
norms, sigma sqrt(d)/(C sqrt(h T)). But gradients lie in far fewer than d directions,
and noise in the other directions does little harm: networks with 30 times as many
weights trained as well at the same epsilon. In the trainings that we tried (``python -m
simulations.study trainability``) what decided was

    load = sigma d^(1/4) / (C sqrt(h T)) / 0.3,

as if gradients had sqrt(d) directions. The exponent and 0.3 are fitted and not proved.
Halfway to what a task gives without noise, at the best of three learning rates, came 0
of 16 settings with a load above 1 where they were fitted, and 2 of 7 on another seed:
on a task so easy that even a random model is right for nine of ten, if it is lucky.
Below 0.15 came 24 of 28 and 13 of 15.

**The growth.** A learning rate gamma turns the noise into a random walk of the weights.
A layer of norm w whose weights walk by a norm of v multiplies its outputs by
sqrt(1 + (v/w)^2), and the layers multiply each other: a rate that suits a training
without noise may blow up the model with it. Above a growth of 300 one run of 35 got
halfway, and on another seed 5 of 11, all of them on that task.

Adversaries are in neither; they only make it worse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flwr_safedshb.theory.checks import (
    check_momentum,
    check_not_negative,
    check_positive,
)
from flwr_safedshb.theory.robustness import check_num_malicious

# sigma d^(1/4) / (C sqrt(h T)) above which hardly any training succeeded.
_NOISE_LIMIT = 0.3
# Of the growth: above the first hardly any training succeeded, and the second is safe.
MAX_GROWTH, SAFE_GROWTH = 300.0, 10.0
# Below this load most trainings got halfway.
SAFE_LOAD = 0.15

Verdict = Literal["will not train", "may not train", "can train"]


@dataclass(frozen=True)
class NoiseLoad:
    """The noise of a training beside the most that its gradients can do.

    Attributes
    ----------
    d : int
        Trained weights.
    steps : int
        T.
    clip_norm, noise_std : float
        C, and sigma_DP of one node in every coordinate of its gradient.
    n, f : int
        Nodes, and adversaries among them, whom the rule leaves out.
    """

    d: int
    steps: int
    clip_norm: float
    noise_std: float
    n: int
    f: int = 0

    def __post_init__(self) -> None:
        check_positive(d=self.d, steps=self.steps, clip_norm=self.clip_norm)
        check_not_negative(noise_std=self.noise_std)
        check_num_malicious(self.n, self.f)

    @property
    def norm_ratio(self) -> float:
        """The norm of one node's noise in a step, in units of C."""
        return self.noise_std * math.sqrt(self.d) / self.clip_norm

    @property
    def load(self) -> float:
        """The noise, in units of the most that trainings withstood."""
        steps = math.sqrt((self.n - self.f) * self.steps)
        root = math.sqrt(math.sqrt(self.d))
        felt = self.noise_std * root / (self.clip_norm * steps)
        return felt / _NOISE_LIMIT

    @property
    def verdict(self) -> Verdict:
        """What to expect of the training at the best of learning rates."""
        if self.load > 1.0:
            return "will not train"
        return "may not train" if self.load > SAFE_LOAD else "can train"

    # The load is proportional to d^(1/4), to noise_std and to 1/sqrt(n - f).

    def find_weights(self, load: float = SAFE_LOAD) -> int:
        """Return how many trained weights have this load; 0 if not even one has."""
        return math.floor(self.d * min(1.0, load / self.load) ** 4)

    def find_nodes(self, load: float = SAFE_LOAD) -> int:
        """Return how many nodes, f adversaries among them, have this load."""
        honest = math.ceil((self.n - self.f) * (self.load / load) ** 2)
        return max(honest, self.f + 1) + self.f


def walk_length(
    noise_std: float, d: int, honest: int, steps: int, rate: float, momentum: float
) -> float:
    """Return the norm by which noise moves d weights in T steps.

    The noise of a step stays in the momentum: the one of k steps before the end moves
    the model by gamma (1 - beta^k) times itself.

    Parameters
    ----------
    noise_std : float
        Of one node in every coordinate of its gradient.
    d, honest, steps : int
        Weights, nodes whose mean is taken, and T.
    rate, momentum : float
        gamma and beta, constant.
    """
    check_not_negative(noise_std=noise_std)
    check_positive(d=d, honest=honest, steps=steps, rate=rate)
    check_momentum(momentum)
    beta, powers = momentum, momentum**steps
    # The sum over k = 1..T of (1 - beta^k)^2, by geometric series.
    total = float(steps)
    if beta:
        total -= 2 * beta * (1 - powers) / (1 - beta)
        total += beta**2 * (1 - powers**2) / (1 - beta**2)
    return rate * noise_std * math.sqrt(d * max(total, 0.0) / honest)


def growth(layers: Sequence[tuple[int, float]], walk_per_weight: float) -> float:
    """Return by how much noise alone multiplies the outputs of a model.

    Parameters
    ----------
    layers : sequence of (int, float)
        Of every weight matrix, the number of weights and their norm at the start. One
        that starts at zero has no outputs to compare with, and is left out.
    walk_per_weight : float
        How far noise moves each weight: `walk_length` for d = 1.
    """
    check_not_negative(walk_per_weight=walk_per_weight)
    exponent = sum(
        0.5 * math.log1p(size * (walk_per_weight / norm) ** 2)
        for size, norm in layers
        if norm > 0
    )
    return math.exp(min(exponent, 300.0))


def find_rate(
    layers: Sequence[tuple[int, float]], walk_per_weight: float, rate: float
) -> float:
    """Return the largest learning rate up to `rate` whose growth is harmless.

    `walk_per_weight` is that of `rate`, and proportional to it.
    """
    low, high = 0.0, 1.0
    if growth(layers, walk_per_weight) <= SAFE_GROWTH:
        return rate
    for _ in range(60):
        middle = (low + high) / 2
        safe = growth(layers, middle * walk_per_weight) <= SAFE_GROWTH
        low, high = (middle, high) if safe else (low, middle)
    return low * rate
