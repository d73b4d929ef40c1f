"""How good the model is without a fault: the same federation, in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from flwr.app import UserConfig
from flwr.clientapp import ClientApp

from flwr_safedshb.simulation.in_process import InProcessGrid
from flwr_safedshb.strategy import SafeDSHB
from simulations.chaos.app import client, initial_model
from simulations.chaos.problem import BETA, NODES, Vector, find_optimum

# How many deviations from the mean are still noise.
_WIDTH = 4.0


@dataclass(frozen=True)
class Tolerance:
    """Distances of final models from the optimum, over seeds: their mean and spread."""

    mean: float
    deviation: float

    @property
    def limit(self) -> float:
        """Beyond this a model is worse than noise explains."""
        return self.mean + _WIDTH * self.deviation

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.deviation:.3f}"


def measure_tolerance(seed: int, steps: int, runs: int = 40) -> Tolerance:
    """Train with the hostile node and no other fault, under `runs` other seeds."""
    with quiet_flower():
        distances = [
            np.linalg.norm(train_in_process(client, each, steps) - find_optimum(each))
            for each in range(seed + 1, seed + 1 + runs)
        ]
    return Tolerance(float(np.mean(distances)), float(np.std(distances, ddof=1)))


def train_in_process(app: ClientApp, seed: int, steps: int) -> Vector:
    """Train the suite's federation in this process; return the model, (DIMENSION,)."""
    config: UserConfig = {"folder": "", "orders": "", "seed": seed}
    strategy = SafeDSHB(num_malicious_nodes=1, momentum=BETA, seed=seed)
    grid = InProcessGrid(app, NODES, config, seed)
    result = strategy.start(grid, initial_model(), num_rounds=steps)
    (model,) = result.arrays.to_numpy_ndarrays()
    return np.asarray(model.reshape(-1), np.float64)


@contextmanager
def quiet_flower() -> Iterator[None]:
    """Let Flower log nothing meanwhile."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
