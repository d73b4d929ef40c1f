"""What runs that differ in their seed alone show: curves, accuracies, losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simulations.results import plots
from simulations.results.plots import Curve
from simulations.results.schema import RunRecord

ATTACK_WORDS = {
    "alie": "ALIE",
    "foe": "FOE",
    "sign-flip": "SF",
    "label-flip": "LF",
    "mimic": "mimic",
    "min-max": "min-max",
    "min-sum": "min-sum",
    "mimic-shift": "mimic-shift",
    "drift": "drift",
    "strongest": "strongest",
}
QUANTITIES = ("accuracy", "training_loss")
# Runs by their method, then by their seed.
Groups = Mapping[str, Sequence[RunRecord]]


@dataclass(frozen=True)
class Figure:
    """Final accuracies of one method over the seeds."""

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


def curve(runs: Sequence[RunRecord], quantity: str) -> Curve:
    """Return a quantity against the step, for all seeds."""
    steps = np.asarray(runs[0]["evaluations"]["step"], dtype=np.float64)
    values = [run["evaluations"][quantity] for run in runs]  # type: ignore[literal-required]
    return Curve(steps, np.asarray(values, dtype=np.float64))


def final(runs: Sequence[RunRecord]) -> Figure:
    """Return mean and sample standard deviation of the returned models' accuracies."""
    last = np.array([run["returned"]["accuracy"] for run in runs])
    return Figure(
        float(last.mean()), float(last.std(ddof=min(1, len(last) - 1))), len(last)
    )


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


def draw(panels: Mapping[str, tuple[str, Groups]], together: str, folder: Path) -> None:
    """Draw panels one by one and together, a figure for each quantity.

    Parameters
    ----------
    panels : mapping of a file's name to a panel's title and groups
    together : str
        Name of the file that has all of them.
    folder : Path
    """
    for quantity in QUANTITIES:
        content = {}
        for name, (title, groups) in panels.items():
            content[title] = {k: curve(some, quantity) for k, some in groups.items()}
            figure = plots.panel(content[title], quantity, title)
            plots.save(figure, folder / f"{name}_{quantity}")
        plots.save(plots.panels(content, quantity), folder / f"{together}_{quantity}")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]
