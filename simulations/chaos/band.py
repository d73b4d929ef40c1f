"""How good the model is without a fault: the same federation, in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from flwr.app import UserConfig

from flwr_safedshb.simulation.in_process import InProcessGrid
from flwr_safedshb.strategy import SafeDSHB
from simulations.chaos.client import client
from simulations.chaos.problem import BETA, NODES, optimum
from simulations.chaos.server import initial

# How many deviations from the mean are still noise.
_WIDTH = 4.0


@dataclass(frozen=True)
class Band:
    """Distances of final models from the optimum, over seeds: their mean and spread."""

    mean: float
    deviation: float

    @property
    def limit(self) -> float:
        """Beyond this a model is worse than noise explains."""
        return self.mean + _WIDTH * self.deviation

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.deviation:.3f}"


def measured(seed: int, steps: int, runs: int = 40) -> Band:
    """Train with the hostile node and no other fault, under `runs` other seeds."""
    with quiet():
        distances = [_distance(seed + 1 + run, steps) for run in range(runs)]
    return Band(float(np.mean(distances)), float(np.std(distances, ddof=1)))


def _distance(seed: int, steps: int) -> float:
    config: UserConfig = {"folder": "", "orders": "", "seed": seed}
    strategy = SafeDSHB(num_malicious_nodes=1, momentum=BETA, seed=seed)
    grid = InProcessGrid(client, NODES, config, seed)
    result = strategy.start(grid, initial(), num_rounds=steps)
    (model,) = result.arrays.to_numpy_ndarrays()
    return float(np.linalg.norm(model.reshape(-1) - optimum(seed)))


@contextmanager
def quiet() -> Iterator[None]:
    """Let Flower log nothing meanwhile."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
