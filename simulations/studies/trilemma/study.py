"""The study: which settings, on how many processes, and what is left in the folder."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import track

from flwr_safedshb.atomic_io import replace_file
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.theory import check_num_malicious
from simulations.config import check_numbers
from simulations.results.parallel import run_in_processes
from simulations.studies.trilemma import analysis, figures
from simulations.studies.trilemma.analysis import Cell, Measured
from simulations.studies.trilemma.points import RULES, Point, errors

# Seeds that a process takes at a time: few, so that no process waits for another.
BLOCK = 4


@dataclass(frozen=True)
class Sweep:
    """Values of one quantity, the others as they are elsewhere.

    Attributes
    ----------
    values : sequence of numbers
        Of "n" with f in proportion, of "f", "d", "m", "epsilon" or "heterogeneity".
    others : mapping
        What differs from the study's `base`.
    fit_from : float
        Slopes are fitted to the values from this one on.
    """

    values: Sequence[float]
    others: Mapping[str, float] = field(default_factory=dict)
    fit_from: float = 0.0

    def __post_init__(self) -> None:
        if sum(value >= self.fit_from for value in self.values) < 2:
            raise ValueError(
                f"fit_from={self.fit_from} leaves fewer than two of {self.values} to "
                "fit a slope to; lower it, or add values"
            )


@dataclass(frozen=True)
class EmpiricalTrilemma:
    """Errors against each quantity of the trilemma, and the slopes that they have.

    Attributes
    ----------
    base : mapping
        n, f, d, m, epsilon and heterogeneity.
    sweeps : mapping of a quantity to its sweep
    plain : sequence of str
        Sweeps that are also made without adversaries.
    delta : float
    seed, num_seeds : int
        The first seed and how many, one after the other.
    workers : int, optional
        Processes; by default as many as cores.
    """

    base: Mapping[str, float]
    sweeps: Mapping[str, Sweep]
    plain: Sequence[str]
    delta: float
    seed: int
    num_seeds: int
    workers: int | None = None

    def __post_init__(self) -> None:
        check_numbers(
            self,
            {"seed": 0, "num_seeds": 2}
            | ({} if self.workers is None else {"workers": 1}),
        )
        if not 0 < self.delta < 1:
            raise ValueError(f"delta={self.delta} must lie in (0, 1)")
        known = [name.name for name in fields(Point) if name.name != "noise_std"]
        for names in (self.base, self.sweeps, self.plain):
            if unknown := set(names) - set(known):
                raise ValueError(f"{min(unknown)} must be one of {', '.join(known)}")
        if not self.plain or not set(self.plain) <= self.sweeps.keys():
            raise ValueError(f"plain={self.plain} must name sweeps, at least one")
        if "n" not in self.sweeps:
            raise ValueError("sweeps must hold n, along which rules are told apart")
        for name, sweep in self.sweeps.items():
            for value in sweep.values:
                values = self._values(name, value, sweep.others)
                n, f = int(values["n"]), round(values["f"])
                check_num_malicious(n, f)
                if not min(values["d"], values["m"]) >= 1 or not values["epsilon"] > 0:
                    raise ValueError(
                        f"{name}={value}: d and m must be at least 1, epsilon above 0"
                    )

    def __call__(self, folder: Path) -> None:
        """Measure, analyse and draw; leave everything in a folder."""
        # Here, so that the processes that measure do not wait for torch and Flower.
        from simulations.results.machine import versions

        console = Console()
        start = time.perf_counter()
        measured, spent = self.measure(console)
        found = analysis.findings(measured, self.fits())
        seconds = time.perf_counter() - start
        record = {
            "config": asdict(self),
            "versions": versions(),
            "seconds": seconds,
            "processor_seconds": spent,
            "cells": [cell.as_json() for cell in measured.values()],
            **found,
        }
        text = json.dumps(record, allow_nan=False, indent=1) + "\n"
        replace_file(folder / "trilemma.json", lambda file: file.write(text.encode()))
        figures.draw(measured, folder)
        summary = analysis.markdown(found)
        (folder / "trilemma.md").write_text(summary)
        console.print(Markdown(summary))
        console.print(
            f"{seconds:.0f} s, {spent:.0f} s of processors; figures, table and all "
            f"errors are in {folder}"
        )

    def fits(self) -> dict[str, float]:
        """Return where the fit of each sweep begins."""
        return {name: sweep.fit_from for name, sweep in self.sweeps.items()}

    def points(self) -> Iterator[tuple[str, float, Point]]:
        """Yield sweep, value and setting; names of plain sweeps end in ", f = 0"."""
        for name, sweep in self.sweeps.items():
            for value in sweep.values:
                point = self._point(name, value, sweep.others)
                yield name, value, point
                if name in self.plain:
                    yield f"{name}, f = 0", value, replace(point, f=0)

    def measure(self, console: Console) -> tuple[Measured, float]:
        """Measure every rule in every setting; return the processors' seconds, too."""
        cells = {
            (sweep, value, rule): Cell(sweep, value, rule, point)
            for sweep, value, point in track(
                list(self.points()), "calibrating noise", console=console
            )
            for rule in RULES
        }
        seeds = range(self.seed, self.seed + self.num_seeds)
        blocks = [seeds[i : i + BLOCK] for i in range(0, len(seeds), BLOCK)]
        tasks = [(key, cells[key], block) for key in cells for block in blocks]
        tasks.sort(key=lambda task: -task[1].point.n)
        found = run_in_processes(_task, tasks, self.workers, "measuring", console)
        spent = 0.0
        for (key, block, values), seconds in found:
            cells[key].add(block, values)
            spent += seconds
        return cells, spent

    def _values(
        self, name: str, value: float, others: Mapping[str, float]
    ) -> dict[str, float]:
        values = {**self.base, **others, name: value}
        if name == "n":
            values["f"] = value * self.base["f"] / self.base["n"]
        return values

    def _point(self, name: str, value: float, others: Mapping[str, float]) -> Point:
        values = self._values(name, value, others)
        m, epsilon = int(values["m"]), float(values["epsilon"])
        # One release of all points: the Gaussian mechanism itself.
        plan = PrivacyPlan.calibrate(
            epsilon, self.delta, 1, clip_norm=1.0, batch_size=m, num_examples=m
        )
        return Point(
            n=int(values["n"]),
            f=round(values["f"]),
            d=int(values["d"]),
            m=m,
            epsilon=epsilon,
            heterogeneity=float(values["heterogeneity"]),
            noise_std=plan.noise_std,
        )


Key = tuple[str, float, str]


def _task(
    key: Key, cell: Cell, seeds: Sequence[int]
) -> tuple[Key, Sequence[int], dict[str, list[float]]]:
    return key, seeds, errors(cell.point, cell.rule, seeds)
