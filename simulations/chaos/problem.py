"""What the federation learns: the mean of its data, with squared loss.

The optimum is known and a momentum follows from the seed, the model and the steps taken
in eight lines, so every message that leaves a node can be checked to the last digit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.randomness.noise import SeededRandomness

NODES = 5
HOSTILE = 4  # the node that is adversarial throughout; f = 1
HONEST = [node for node in range(NODES) if node != HOSTILE]
DIMENSION = 4
EXAMPLES = 64
BETA = 0.2
PLAN = PrivacyPlan(3.0, 0.5, 32, EXAMPLES)
DELTA = 1e-5
MAX_EPSILON = 1e3

Vector = NDArray[np.float64]


def make_data(partition: int, seed: int) -> NDArray[np.float32]:
    """Return the examples of a node, (EXAMPLES, DIMENSION), around 1."""
    rng = np.random.default_rng([seed, partition])
    values = 1.0 + 0.3 * rng.standard_normal((EXAMPLES, DIMENSION))
    return values.astype(np.float32)


def find_optimum(seed: int) -> Vector:
    """Return the model that the honest nodes' data ask for, (DIMENSION,)."""
    means = [make_data(i, seed).mean(axis=0) for i in HONEST]
    return np.asarray(np.mean(means, axis=0), np.float64)


def compute_private_gradient(
    partition: int, step: int, model: Vector, seed: int
) -> Vector:
    """Return the noisy gradient of a node, (DIMENSION,) (Alg. 1, lines 4 to 6)."""
    randomness = SeededRandomness(seed).for_step(partition, step)
    batch = PLAN.sampler.draw(PLAN, randomness)
    gradients = model - make_data(partition, seed)[batch]
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    clipped = gradients * np.minimum(1.0, PLAN.clip_norm / norms)
    noise = randomness.gaussian(DIMENSION, PLAN.noise_std)
    return np.asarray(clipped.sum(axis=0) / PLAN.batch_size + noise, np.float64)


def compute_momentum(
    partition: int, steps: Sequence[int], models: Mapping[int, Vector], seed: int
) -> Vector:
    """Return the momentum of a node that took these steps (Alg. 1, line 7)."""
    total = np.zeros(DIMENSION)
    for step in steps:
        gradient = compute_private_gradient(partition, step, models[step], seed)
        total = BETA * total + (1.0 - BETA) * gradient
    return total
