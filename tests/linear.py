"""A problem whose gradients do not depend on the model."""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.randomness.noise import SeededRandomness

PLAN = PrivacyPlan(1.0, 0.2, 5, 20)
BETA, SEED, ROUNDS = 0.5, 5, 4


def data(partition: int) -> torch.Tensor:
    """Return inputs, (20, 3), whose norms are below the clip."""
    generator = torch.Generator().manual_seed(partition)
    return 0.1 * torch.randn(20, 3, generator=generator) + 0.2


def momentum(partition: int, steps: Iterable[int]) -> NDArray[np.float64]:
    """Return the momentum of a node, (3,), that took these steps."""
    total = np.zeros(3)
    for step in steps:
        randomness = SeededRandomness(SEED).for_step(partition, step)
        batch = PLAN.sampler.draw(PLAN, randomness)
        mean = data(partition)[torch.from_numpy(batch)].numpy().sum(axis=0)
        noisy = mean / PLAN.batch_size + randomness.gaussian(3, PLAN.noise_std)
        total = BETA * total + (1 - BETA) * noisy
    return total
