"""Statistics of runs that differ in their seed alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulations.results.plots import Curve
from simulations.results.schema import RunRecord

QUANTITIES = ("accuracy", "training_loss")


@dataclass(frozen=True)
class MeanStd:
    """Mean and sample standard deviation over the seeds."""

    mean: float
    std: float
    seeds: int

    @property
    def error(self) -> float:
        """Standard error of the mean; infinite for one seed, which says nothing."""
        return self.std / np.sqrt(self.seeds) if self.seeds > 1 else float("inf")

    def __str__(self) -> str:
        spread = f" ± {self.std:.3f}" if self.seeds > 1 else ""
        return f"{self.mean:.3f}{spread}"


def mean_std(values: Sequence[float]) -> MeanStd:
    """Return mean and sample standard deviation; 0 for one value."""
    array = np.array(values)
    std = float(array.std(ddof=min(1, len(array) - 1)))
    return MeanStd(float(array.mean()), std, len(array))


def curve(runs: Sequence[RunRecord], quantity: str) -> Curve:
    """Return a quantity against the step, for all seeds."""
    steps = np.asarray(runs[0]["evaluations"]["step"], dtype=np.float64)
    values = [run["evaluations"][quantity] for run in runs]  # type: ignore[literal-required]
    return Curve(steps, np.asarray(values, dtype=np.float64))


def final(runs: Sequence[RunRecord]) -> MeanStd:
    """Return the accuracy of the models that the runs returned."""
    return mean_std([run["returned"]["accuracy"] for run in runs])


@dataclass(frozen=True)
class Losses:
    """Training losses before the first and after the last step, means over seeds."""

    first: float
    last: float

    @property
    def falls(self) -> bool:
        """Whether it ends lower than it began."""
        return self.last < self.first

    def __str__(self) -> str:
        text = f"{self.first:.3f} to {self.last:.3f}"
        return text if self.falls else f"**rises: {text}**"


def losses(runs: Sequence[RunRecord]) -> Losses:
    """Return how the training loss went, on average over the seeds."""
    mean = curve(runs, "training_loss").values.mean(axis=0)
    return Losses(float(mean[0]), float(mean[-1]))


def late(runs: Sequence[RunRecord], quantity: str) -> NDArray[np.float64]:
    """Return the mean of a quantity over the last quarter of the steps, (seeds,).

    Momentum makes a model that is pushed swing to and fro, and where the last step
    catches it is chance.
    """
    found = curve(runs, quantity)
    last = found.steps > 0.75 * found.steps[-1]
    mean: NDArray[np.float64] = found.values[:, last].mean(axis=1)
    return mean


def format_epsilons(runs: Sequence[RunRecord]) -> str:
    """Return the epsilons of some runs, from the smallest to the largest."""
    found = [run["privacy"]["epsilon"] for run in runs]
    values = sorted(float("inf") if e is None else e for e in found)
    words = ["∞" if e == float("inf") else f"{e:.3g}" for e in values]
    return words[0] if words[0] == words[-1] else f"{words[0]} to {words[-1]}"
