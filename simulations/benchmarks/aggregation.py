"""SMEA against peers and the floor: ``python -m simulations.benchmarks.aggregation``.

One run, a table of medians and ratios, JSON and a figure. Compared are `SMEA`, brute
force on the Gram matrix, ByzFL and ByzPy (``make peers``), and what cannot be avoided,
the Gram matrix. Everything runs on one thread, and what is compared takes turns on the
same input.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from threadpoolctl import threadpool_limits

from simulations.benchmarks import report
from simulations.benchmarks.cells import (
    PATIENT,
    Cell,
    Sample,
    filter_turns,
    hostile_ends,
    measure,
    warm_up,
)
from simulations.benchmarks.families import ALIE_DEVIATIONS, FAMILIES
from simulations.benchmarks.measure import record
from simulations.benchmarks.processes import (
    CompilerTimes,
    ask,
    compiler_times,
    first_calls,
)
from simulations.benchmarks.rivals import Rival, rivals
from simulations.benchmarks.targets import (
    Check,
    filter_check,
    hostile_checks,
    memory_check,
    sample_checks,
)

SIZES = (
    (7, 3),
    (10, 4),
    (15, 6),
    (20, 6),
    (20, 9),
    (25, 8),
    (30, 9),
    (40, 8),
    (50, 10),
    (100, 10),
)
# Largest n that is also run without a compiler.
INTERPRETED = 40
OUT = Path("outputs/benchmarks/aggregation")


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes
    ----------
    cells : tuple of (n, f, d)
    seeds : int
        Inputs of each family in a cell; rivals get the first.
    patient_seeds : int
        The same where the search has a time limit.
    rival_limit : float
        Seconds of a call above which a rival is sampled.
    compiler : bool
        Whether to time compilation, and small cells without it.
    filter_cell, memory_cell : (n, f, d) and (n, d), or None
        Where Filter and the memory are measured.
    hostile : bool
        Whether to try the inputs made to defeat the search.
    """

    cells: tuple[Cell, ...]
    seeds: int = len(ALIE_DEVIATIONS)
    patient_seeds: int = 1
    rival_limit: float = 10.0
    compiler: bool = True
    filter_cell: Cell | None = (1000, 100, 100_000)
    memory_cell: tuple[int, int] | None = (50, 10_000_000)
    hostile: bool = True


FULL = Settings(
    cells=(
        *((n, f, 69) for n, f in SIZES),
        (20, 6, 4096),
        *((n, f, 100_000) for n, f in SIZES),
    )
)
QUICK = Settings(
    cells=((7, 3, 69), (15, 6, 69), (15, 6, 4096)),
    seeds=2,
    rival_limit=0.5,
    compiler=False,
    filter_cell=None,
    memory_cell=None,
    hostile=False,
)


@dataclass(frozen=True)
class Results:
    """What a run measured; seconds, except where said."""

    first_calls: tuple[float, float] | None
    samples: list[Sample]
    compiler: dict[Cell, CompilerTimes]
    checks: list[Check]


def run(settings: Settings, progress: Progress) -> Results:
    """Measure everything that the settings ask for."""
    contenders = rivals()
    warm_up()
    inputs = _inputs(settings)
    task = progress.add_task("", total=len(inputs))
    samples = []
    for cell, name, seed in inputs:
        progress.update(task, description=f"{report.size(cell)} {name}")
        asked: Mapping[str, Rival] = contenders if seed == 0 else {}
        samples.append(measure(cell, name, seed, asked, settings.rival_limit))
        progress.advance(task)

    small = [c for c in settings.cells if settings.compiler and c[0] <= INTERPRETED]
    if settings.compiler:
        progress.add_task("the compiler, and without it", total=None)
    return Results(
        first_calls=first_calls() if settings.compiler else None,
        samples=samples,
        compiler=compiler_times(small) if small else {},
        checks=sample_checks(samples) + _special_checks(settings, progress),
    )


def _inputs(settings: Settings) -> list[tuple[Cell, str, int]]:
    """List every input, the seeds of a cell after each other."""
    return [
        (cell, name, seed)
        for cell in settings.cells
        for seed in range(
            settings.seeds if cell[0] < PATIENT else settings.patient_seeds
        )
        for name in FAMILIES
    ]


def _special_checks(settings: Settings, progress: Progress) -> list[Check]:
    checks = []
    progress.add_task("Filter, memory, hostile inputs", total=None)
    if settings.filter_cell is not None:
        n, f, d = settings.filter_cell
        checks.append(filter_check(filter_turns(n, f, d), n, d))
    if settings.memory_cell is not None:
        (models,) = ask("memory", *settings.memory_cell)
        checks.append(memory_check(models, *settings.memory_cell))
    if settings.hostile:
        checks += hostile_checks(hostile_ends())
    return checks


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small cells only")
    parser.add_argument("--out", type=Path, default=OUT, help="directory")
    options = parser.parse_args(arguments)
    settings = QUICK if options.quick else FULL
    console = Console()
    columns = (
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with (
        threadpool_limits(1),
        Progress(*columns, console=console, transient=True) as progress,
    ):
        results = run(settings, progress)
    report.show(console, results.samples, results.compiler, results.first_calls)
    report.show_checks(console, results.checks)
    figures = asdict(results)
    # JSON has no tuples for keys.
    figures["compiler"] = [
        {"cell": cell, "seconds": value} for cell, value in results.compiler.items()
    ]
    record(options.out / "aggregation.json", asdict(settings), figures)
    report.plot(options.out / "aggregation.png", results.samples, results.compiler)
    console.print(f"Written: {options.out}/aggregation.json and .png")


if __name__ == "__main__":
    main()
