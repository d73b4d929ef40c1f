"""SMEA against its peers: ``python -m simulations.benchmarks.aggregation``.

Compared are `SMEA`, brute force on the Gram matrix, ByzFL and ByzPy (``make peers``),
and its Gram matrix alone. Everything runs on one thread, and what is compared takes
turns on the same input.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.progress import track
from threadpoolctl import threadpool_limits

from flwr_safedshb.aggregation import SMEA, Filter
from flwr_safedshb.aggregation.gram import gram_matrix
from simulations.benchmarks import grid, growth, large
from simulations.benchmarks.families import (
    ALIE_DEVIATIONS,
    FAMILIES,
    HOSTILE,
    make_family,
)
from simulations.benchmarks.grid import PATIENT, Cell, GridSample, read_certificate
from simulations.benchmarks.measure import (
    call_alone,
    median_in_turns,
    peak_megabytes,
    thread_seconds,
)
from simulations.benchmarks.peers import Peer, load_peers
from simulations.benchmarks.result import (
    Measurement,
    Result,
    ResultTable,
    run_benchmark,
)

SIZES = (
    *((7, 3), (10, 4), (15, 6), (20, 6), (20, 9)),
    *((25, 8), (30, 9), (40, 8), (50, 10), (100, 10)),
)
# Largest n that is also run without a compiler.
INTERPRETED = 40


@dataclass(frozen=True)
class GridSettings:
    """What is measured."""

    cells: tuple[Cell, ...]
    # Inputs of each family in a cell; peers get the first, and there is only that where
    # the search has a time limit.
    seeds: int
    peer_limit: float  # seconds of a call above which a peer is sampled
    # Whether the compiler, Filter, memory, hostile inputs and hundreds of vectors are
    # measured, and growth is followed to large sizes.
    whole: bool


FULL = GridSettings(
    cells=(
        *((n, f, 69) for n, f in SIZES),
        (20, 6, 4096),
        *((n, f, 100_000) for n, f in SIZES),
    ),
    seeds=len(ALIE_DEVIATIONS),
    peer_limit=2.0,
    whole=True,
)
QUICK = GridSettings(((7, 3, 69), (15, 6, 69), (15, 6, 4096)), 2, 0.5, whole=False)


def measure(quick: bool) -> Result:
    """Measure everything that the settings ask for."""
    settings = QUICK if quick else FULL
    with threadpool_limits(1):
        grid.compile_search()
        samples = measure_grid(settings)
        curves = growth.measure_growth(settings.whole)
        tables = [growth.make_table(curves)]
        figures = grid.read_figures(samples) | growth.read_figures(curves)
        compiler: dict[Cell, float] = {}
        calls: list[large.LargeCall] = []
        note = ""
        if settings.whole:
            compiler = grid.compare_compiler(
                [cell for cell in settings.cells if cell[0] <= INTERPRETED]
            )
            note = describe_first_calls()
            hostile, certified = measure_hostile()
            calls = large.measure_calls()
            tables += [hostile, large.make_table(calls)]
            figures |= large.read_figures(calls) | {
                "hostile inputs: certified answers": certified,
                "Filter, n = 1,000, d = 100,000: / Gram": measure_filter(
                    1000, 100, 100_000
                ),
                "extra memory, n = 50, d = 10,000,000": Measurement(
                    call_alone(measure_memory, 50, 10_000_000)
                ),
            }
    cells = grid.group_by((s for s in samples if s.cell[0] < PATIENT), lambda s: s.cell)
    return Result(
        tables=[*grid.make_tables(samples, compiler, note), *tables],
        figures=figures,
        costs={
            f"SMEA ({n}, {f}), d = {d:,} / Gram": grid.median_ratio(
                group, "SMEA", "gram"
            )
            for (n, f, d), group in cells.items()
        },
        raw={
            "settings": asdict(settings),
            "samples": [asdict(sample) for sample in samples],
            "growth": [asdict(curve) for curve in curves],
            "large": [asdict(call) for call in calls],
        },
        panels=[*grid.make_panels(samples), *growth.make_panels(curves)],
    )


def measure_grid(settings: GridSettings) -> list[GridSample]:
    """Measure every input of the grid; peers get the first seed of each."""
    peers = load_peers()
    inputs = [
        (cell, name, seed)
        for cell in settings.cells
        for seed in range(settings.seeds if cell[0] < PATIENT else 1)
        for name in FAMILIES
    ]
    console = Console(stderr=True)
    samples = []
    for cell, name, seed in track(inputs, "SMEA", console=console, transient=True):
        asked: dict[str, Peer] = {} if seed else peers
        limit = settings.peer_limit
        samples.append(grid.measure_sample(cell, name, seed, asked, limit))
    return samples


def describe_first_calls() -> str:
    """Say what a process's first search costs: to compile, and from the cache."""
    # An empty folder takes the place of the compiler's cache.
    with tempfile.TemporaryDirectory() as cache:
        cold = call_alone(grid.compile_search, NUMBA_CACHE_DIR=cache)
        warm = call_alone(grid.compile_search, NUMBA_CACHE_DIR=cache)
    return (
        f" Not in the times: a first search compiles for {cold:.1f} s, once on a "
        f"machine, and loads that for {warm:.1f} s, once in a process."
    )


def measure_filter(n: int, f: int, d: int) -> Measurement:
    """Return Filter's time in Gram matrices."""
    vectors = make_family("alie", n, f, d, seed=4)
    clients = [[row] for row in vectors]
    calls = {
        "Filter": lambda: Filter()(vectors, f),
        "gram": lambda: gram_matrix(clients),
    }
    seconds = median_in_turns(calls, enough=10.0, most=3)
    return Measurement(seconds["Filter"] / seconds["gram"])


def measure_memory(n: int, d: int) -> float:
    """Return the peak beyond the replies while aggregating, in models of d float32.

    Every reply has four layers and memory of its own, as messages have.
    """
    grid.compile_search()  # before the replies: what the compiler frees is for them
    rng = np.random.default_rng(0)
    quarter = d // 4
    replies = [
        [rng.standard_normal(quarter, dtype=np.float32) for _ in range(4)]
        for _ in range(n)
    ]
    peak = peak_megabytes(lambda: SMEA()(replies, n // 5))
    return peak * 2**20 / (4.0 * 4 * quarter)


def measure_hostile() -> tuple[ResultTable, Measurement]:
    """Measure inputs that were made to defeat the search, which its budget ends."""
    rows, certified = [], []
    for name, (vectors, f) in HOSTILE.items():
        products = gram_matrix([[row] for row in vectors])
        seconds, answer = thread_seconds(lambda p=products, f=f: SMEA().weigh(p, f))  # type: ignore[misc]
        gap, kappa = read_certificate(answer)
        certified.append(math.isfinite(kappa))
        rows.append((name, seconds, gap, kappa))
    heads = ("vectors", "s", "gap", "kappa")
    table = ResultTable("Inputs made to defeat the search", heads, rows)
    return table, grid.count_share(certified)


if __name__ == "__main__":
    raise SystemExit(run_benchmark("aggregation"))
