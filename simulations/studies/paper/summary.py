"""What the reproduction shows: curves, final accuracies, losses, panels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from simulations.results import plots
from simulations.results.plots import Curve
from simulations.results.record import RunRecord
from simulations.studies.paper.reproduce import (
    ATTACKS,
    BENCHMARK,
    REGIMES,
    Case,
)

Runs = Mapping[Case, RunRecord]

METHOD_WORDS = {
    "dp-dsgd": "DP-DSGD, no attack",
    "smea": "Safe-DSHB, SMEA",
    "filter-literal": "Safe-DSHB, Filter",
    "filter": "Filter, default stop",
}
ATTACK_WORDS = {
    "alie": "ALIE",
    "foe": "FOE",
    "sign-flip": "SF",
    "label-flip": "LF",
}
QUANTITIES = ("accuracy", "training_loss")


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


def group(runs: Runs, regime: str, method: str, attack: str | None) -> list[RunRecord]:
    """Return the runs that differ in their seed alone."""
    if method == BENCHMARK:
        attack = None
    return [
        run
        for case, run in runs.items()
        if (case.regime, case.method, case.attack) == (regime, method, attack)
    ]


def curve(runs: Sequence[RunRecord], quantity: str) -> Curve:
    """Return a quantity against the step, for all seeds."""
    steps = np.asarray(runs[0]["evaluations"]["step"], dtype=np.float64)
    values = [run["evaluations"][quantity] for run in runs]  # type: ignore[literal-required]
    return Curve(steps, np.asarray(values, dtype=np.float64))


def curves(runs: Runs, regime: str, attack: str, quantity: str) -> dict[str, Curve]:
    """Return the curves of one panel."""
    found = {
        words: group(runs, regime, method, attack)
        for method, words in METHOD_WORDS.items()
    }
    return {words: curve(some, quantity) for words, some in found.items() if some}


def by_panel(runs: Runs) -> dict[str, dict[str, list[RunRecord]]]:
    """Return the runs of each panel, by method."""
    return {
        f"{ATTACK_WORDS[attack]}, {regime} privacy": {
            words: some
            for method, words in METHOD_WORDS.items()
            if (some := group(runs, regime, method, attack))
        }
        for regime in regimes(runs)
        for attack in ATTACKS
    }


def final(runs: Sequence[RunRecord]) -> Figure:
    """Return the mean and the sample standard deviation of the last accuracies."""
    last = np.array([run["evaluations"]["accuracy"][-1] for run in runs])
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


def draw(runs: Runs, folder: Path) -> None:
    """Write every panel, and those of a regime and a quantity together."""
    for regime in regimes(runs):
        for quantity in QUANTITIES:
            content = {}
            for attack in ATTACKS:
                title = f"{ATTACK_WORDS[attack]}, {regime} privacy"
                content[title] = curves(runs, regime, attack, quantity)
                name = f"{regime}_{attack}_{quantity}"
                figure = plots.panel(content[title], quantity, title)
                plots.save(figure, folder / name)
            plots.save(plots.panels(content, quantity), folder / f"{regime}_{quantity}")


def regimes(runs: Runs) -> list[str]:
    """Return the regimes there are, in their order."""
    return [regime for regime in REGIMES if any(c.regime == regime for c in runs)]


def table(
    runs: Runs, measure: Callable[[Sequence[RunRecord]], Figure | Losses]
) -> list[dict[str, object]]:
    """Return a measure of the runs that differ in their seed, a row for each panel."""
    return [
        {"regime": regime, "attack": attack}
        | {
            method: measure(some)
            for method in METHOD_WORDS
            if (some := group(runs, regime, method, attack))
        }
        for regime in regimes(runs)
        for attack in ATTACKS
    ]


def row(cells: Sequence[str]) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(cells)} |"
