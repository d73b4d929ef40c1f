"""SMEA against peers and the floor: ``python -m simulations.benchmarks.aggregation``.

One run, a table of medians and ratios, JSON and a figure. Compared are `SMEA`, brute
force on the Gram matrix, ByzFL and ByzPy (``make peers``), and what cannot be avoided,
the Gram matrix. Everything runs on one thread, and what is compared takes turns on the
same input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from threadpoolctl import threadpool_limits

from simulations.benchmarks import growth, large, outcome, report
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
from simulations.benchmarks.growth import Growth
from simulations.benchmarks.outcome import Check, Outcome
from simulations.benchmarks.processes import (
    CompilerTimes,
    ask,
    compiler_times,
    first_calls,
)
from simulations.benchmarks.rivals import Rival, rivals
from simulations.benchmarks.targets import (
    filter_check,
    hostile_checks,
    memory_check,
    ratio,
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
    large : tuple of int
        Numbers of vectors at which default calls are bounded.
    far : bool
        Whether growth is followed to large sizes.
    """

    cells: tuple[Cell, ...]
    seeds: int = len(ALIE_DEVIATIONS)
    patient_seeds: int = 1
    rival_limit: float = 2.0
    compiler: bool = True
    filter_cell: Cell | None = (1000, 100, 100_000)
    memory_cell: tuple[int, int] | None = (50, 10_000_000)
    hostile: bool = True
    large: tuple[int, ...] = large.SIZES
    far: bool = True


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
    large=(),
    far=False,
)


@dataclass(frozen=True)
class Results:
    """What a run measured; seconds, except where said."""

    first_calls: tuple[float, float] | None
    samples: list[Sample]
    compiler: dict[Cell, CompilerTimes]
    growths: list[Growth]
    large: list[large.Call]
    checks: list[Check]


def run(quick: bool) -> Outcome:
    """Measure, and tell of it."""
    settings = QUICK if quick else FULL
    columns = (
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with (
        threadpool_limits(1),
        Progress(*columns, console=console, transient=True) as progress,
    ):
        return _told(settings, measured(settings, progress))


def _told(settings: Settings, results: Results) -> Outcome:
    figures = asdict(results)
    # JSON has no tuples for keys.
    figures["compiler"] = [
        {"cell": cell, "seconds": value} for cell, value in results.compiler.items()
    ]
    return Outcome(
        name="aggregation",
        title="Aggregation",
        tables=[
            *report.tables(results.samples, results.compiler, results.first_calls),
            growth.table(results.growths),
            *([large.table(results.large)] if results.large else []),
        ],
        checks=results.checks,
        costs=_costs(results.samples),
        settings=asdict(settings),
        results=figures,
        plot=lambda figure: _plot(figure, results),
    )


def _costs(samples: list[Sample]) -> dict[str, float]:
    """Return SMEA's time in Gram matrices, for the cells that have several sizes."""
    cells = dict.fromkeys(s.cell for s in samples if s.n < PATIENT)
    return {
        f"SMEA {report.size(cell)} / Gram": ratio(
            [s for s in samples if s.cell == cell], "SMEA", "gram"
        )
        for cell in cells
    }


def _plot(figure: Figure, results: Results) -> None:
    figure.set_size_inches(12, 8.5)
    halves = figure.subfigures(2, 1, squeeze=False, height_ratios=(5, 3))
    report.plot(halves[0, 0], results.samples, results.compiler)
    growth.plot(halves[1, 0], results.growths)


def measured(settings: Settings, progress: Progress) -> Results:
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
    progress.add_task("growth", total=None)
    growths = growth.growths(settings.far)
    progress.add_task("many vectors", total=None)
    many = large.calls(settings.large) if settings.large else []
    return Results(
        first_calls=first_calls() if settings.compiler else None,
        samples=samples,
        compiler=compiler_times(small) if small else {},
        growths=growths,
        large=many,
        checks=[
            *sample_checks(samples),
            *_special_checks(settings, progress),
            *growth.checks(growths),
            *(large.checks(many) if many else []),
        ],
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


if __name__ == "__main__":
    raise SystemExit(outcome.main(run, __doc__))
