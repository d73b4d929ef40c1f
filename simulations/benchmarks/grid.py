"""SMEA, its lower bound and its peers on a grid of inputs (n, f, d)."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import numpy as np

from flwr_safedshb.aggregation import SMEA, Weighing
from flwr_safedshb.aggregation.gram import gram_matrix
from flwr_safedshb.aggregation.rule import check_vectors
from simulations.benchmarks.families import (
    ALIE_DEVIATIONS,
    FAMILIES,
    Vectors,
    make_family,
)
from simulations.benchmarks.measure import (
    call_alone,
    median_in_turns,
    thread_seconds,
    time_in_turns,
)
from simulations.benchmarks.peers import PEERS, Peer, Price, measure_price
from simulations.benchmarks.plots import EXTRAPOLATED, Panel
from simulations.benchmarks.result import (
    Measurement,
    ResultTable,
    TableRow,
    format_cell,
)

Cell = tuple[int, int, int]
K = TypeVar("K", bound=Hashable)

# Above so many clients an exact answer is not expected: the search is told when to end.
PATIENT, TIME_LIMIT = 60, 10.0
# Turns on one input, before and after the peers had theirs: seconds and number.
ENOUGH, MOST = 0.12, 12
WIDE = 100_000


@dataclass(frozen=True)
class GridSample:
    """What was measured on one input.

    `seconds` has medians of "SMEA" (checks, Gram matrix, search, mean), "gram" (its
    Gram matrix), "BLAS" (the product alone, of an array that is float64 already) and
    "eigvalsh" (of one n x n matrix).
    """

    cell: Cell
    family: str
    seed: int
    seconds: dict[str, float]
    gap: float  # lambda_max over its proven lower bound, minus 1: 0 is exact
    kappa: float  # certified
    prices: dict[str, Price] = field(default_factory=dict)  # of peers that were asked


def make_rule(n: int) -> SMEA:
    """Return the rule that is measured at n clients."""
    return SMEA() if n < PATIENT else SMEA(time_limit=TIME_LIMIT)


def measure_sample(
    cell: Cell, name: str, seed: int, peers: Mapping[str, Peer], limit: float
) -> GridSample:
    """Measure one input of a family; `limit`: see `measure_price`."""
    n, f, d = cell
    vectors = make_family(name, n, f, d, seed)
    calls, answers = _make_calls(vectors, f)
    turns = time_in_turns(calls, ENOUGH, MOST)
    answer = answers[-1]
    assert answer.subset is not None
    best = tuple(answer.subset.tolist())
    rng = np.random.default_rng([seed, n, d])
    prices = {
        who: measure_price(peer, vectors, f, best, limit, rng)
        for who, peer in peers.items()
    }
    if prices and sum(turns["SMEA"]) < 1.0:
        for key, seconds in time_in_turns(calls, ENOUGH, MOST).items():
            turns[key] += seconds
    medians = {key: median(seconds) for key, seconds in turns.items()}
    return GridSample(cell, name, seed, medians, *read_certificate(answer), prices)


def _make_calls(
    vectors: Vectors, f: int
) -> tuple[dict[str, Callable[[], object]], list[Weighing]]:
    """Return what is timed, and a list that collects SMEA's answers."""
    rule = make_rule(len(vectors))
    answers: list[Weighing] = []

    def smea() -> None:
        # What calling the rule does, without losing the certificate.
        _, weighing = rule.aggregate(check_vectors(vectors, f), f)
        assert weighing is not None
        answers.append(weighing)

    clients = [[row] for row in vectors]
    wide = vectors.astype(np.float64)
    product = wide @ wide.T
    calls: dict[str, Callable[[], object]] = {
        "SMEA": smea,
        "gram": lambda: gram_matrix(clients),
        "BLAS": lambda: wide @ wide.T,
        "eigvalsh": lambda: np.linalg.eigvalsh(product),
    }
    return calls, answers


def read_certificate(answer: Weighing) -> tuple[float, float]:
    """Return the relative gap to the proven lower bound, and kappa."""
    assert answer.lower_bound is not None
    assert answer.kappa is not None
    exact = answer.lambda_max <= answer.lower_bound
    gap = 0.0 if exact else answer.lambda_max / answer.lower_bound - 1.0
    return gap, answer.kappa


def compile_search() -> float:
    """Return the seconds of a first call that searches; later ones have it compiled."""
    vectors = make_family(FAMILIES[0], 15, 6, 20, 0)
    return thread_seconds(lambda: SMEA()(vectors, 6))[0]


def time_cells(cells: Sequence[Sequence[int]]) -> list[float]:
    """Return the median seconds of a call on the first isotropic input of each cell."""
    compile_search()
    medians = []
    for n, f, d in cells:
        rule, vectors = make_rule(n), make_family("isotropic", n, f, d, seed=0)

        def call(rule: SMEA = rule, vectors: Vectors = vectors, f: int = f) -> object:
            return rule(vectors, f)

        medians.append(median_in_turns({"SMEA": call}, 0.5, 15)["SMEA"])
    return medians


def compare_compiler(cells: Sequence[Cell]) -> dict[Cell, float]:
    """Return how many times longer a call takes without a compiler, cell by cell."""
    fast = call_alone(time_cells, cells)
    slow = call_alone(time_cells, cells, NUMBA_DISABLE_JIT="1")
    return {
        cell: slow / fast for cell, fast, slow in zip(cells, fast, slow, strict=True)
    }


# ---- ratios over samples ------------------------------------------------------------


def group_by(
    samples: Iterable[GridSample], key: Callable[[GridSample], K]
) -> dict[K, list[GridSample]]:
    """Group samples by key, in the order of their first."""
    groups: dict[K, list[GridSample]] = {}
    for sample in samples:
        groups.setdefault(key(sample), []).append(sample)
    return groups


def median_ratio(samples: Iterable[GridSample], above: str, below: str) -> float:
    """Return the median over inputs of the ratio of two times of the same turns."""
    return median(s.seconds[above] / s.seconds[below] for s in samples)


def median_speedup(samples: Iterable[GridSample], peer: str) -> Measurement | None:
    """Return how many times longer a peer takes, as the median over its inputs."""
    asked = [s for s in samples if peer in s.prices]
    if not asked:
        return None
    extrapolated = any(s.prices[peer].extrapolated for s in asked)
    value = median(s.prices[peer].seconds / s.seconds["SMEA"] for s in asked)
    return Measurement(value, "extrapolated" if extrapolated else "whole calls")


def count_best(samples: Iterable[GridSample], peer: str) -> tuple[int, int]:
    """Return how often a peer gave SMEA's answer, and how many whole calls it had."""
    found = [s.prices[peer].found for s in samples if peer in s.prices]
    return found.count(True), len(found) - found.count(None)


def count_share(holds: Sequence[bool], note: str = "") -> Measurement:
    """Return the share of what holds; its note starts with the counts."""
    counts = f"{sum(holds)} of {len(holds)}"
    share = sum(holds) / len(holds)
    return Measurement(share, f"{counts}, {note}" if note else counts)


def read_figures(samples: Sequence[GridSample]) -> dict[str, Measurement]:
    """Return the figures that thresholds bound, for which there are samples."""
    figures: dict[str, Measurement] = {}
    by_cell = group_by(samples, lambda s: s.cell)
    for peer, d in (("ByzFL", 69), ("ByzFL", WIDE), ("ByzPy", 4096)):
        if found := median_speedup(by_cell.get((20, 6, d), []), peer):
            figures[f"(20, 6), d = {d:,}: {peer} / SMEA"] = found
    small = [s for s in samples if s.cell[0] <= 30 and s.cell[2] == WIDE]
    if small:
        groups = group_by(small, lambda s: f"({s.cell[0]}, {s.cell[1]}) {s.family}")
        worst = max(
            groups, key=lambda where: median_ratio(groups[where], "SMEA", "gram")
        )
        blas = format_cell(median_ratio(groups[worst], "SMEA", "BLAS"))
        figures["n <= 30, d = 100,000: SMEA / Gram"] = Measurement(
            median_ratio(groups[worst], "SMEA", "gram"), f"worst: {worst}, {blas} BLAS"
        )
    exact = [s for s in samples if s.cell[:2] == (50, 10)]
    for (d, name), group in group_by(exact, lambda s: (s.cell[2], s.family)).items():
        longest = max(s.seconds["SMEA"] / s.seconds["eigvalsh"] for s in group)
        figures[f"(50, 10), d = {d:,}, {name}: SMEA / eigvalsh"] = Measurement(
            median_ratio(group, "SMEA", "eigvalsh"), f"max {format_cell(longest)}"
        )
    if exact:
        gap = max(s.gap for s in exact)
        figures["(50, 10): answers that are exact"] = count_share(
            [s.gap == 0.0 for s in exact], f"gap {gap:.1%}"
        )
    patient = [s for s in samples if s.cell[:2] == (100, 10)]
    if patient:
        note = (
            f"{sum(s.gap == 0.0 for s in patient)} exact, "
            f"gap {max(s.gap for s in patient):.1%}, "
            f"kappa {max(s.kappa for s in patient):.3f}, "
            f"{max(s.seconds['SMEA'] for s in patient):.1f} s"
        )
        figures["(100, 10) in 10 s: certified answers"] = count_share(
            [math.isfinite(s.kappa) for s in patient], note
        )
    hits, runs = count_best(samples, "brute force")
    if runs:
        figures["same subset as brute force"] = count_share(
            [True] * hits + [False] * (runs - hits)
        )
    return figures


# ---- tables and panels --------------------------------------------------------------


def make_tables(
    samples: Sequence[GridSample], compiler: Mapping[Cell, float], note: str
) -> list[ResultTable]:
    """Return times and ratios, a table for each dimension; the last one explains."""
    heads = ("n, f", "subsets", "ms", "max", "/ Gram", "/ BLAS", "numpy", *PEERS)
    tables = []
    for d, group in group_by(samples, lambda s: s.cell[2]).items():
        rows = [
            _make_row(cell, inputs, compiler.get(cell))
            for cell, inputs in group_by(group, lambda s: s.cell).items()
        ]
        title = f"One call of SMEA, d = {d:,}, and how many times longer others take"
        tables.append(ResultTable(title, heads, rows))
    last = tables[-1]
    caption = f"{_make_caption(samples)}{note}"
    return [*tables[:-1], ResultTable(last.title, heads, last.rows, caption)]


def _make_row(
    cell: Cell, group: Sequence[GridSample], compiler: float | None
) -> TableRow:
    n, f, _ = cell
    seconds = [s.seconds["SMEA"] for s in group]
    prices = [median_speedup(group, peer) for peer in PEERS]
    return [
        *(f"{n}, {f}", math.comb(n, f), 1e3 * median(seconds), 1e3 * max(seconds)),
        *(median_ratio(group, "SMEA", floor) for floor in ("gram", "BLAS")),
        compiler,
        *("absent" if price is None else _describe_price(price) for price in prices),
    ]


def _describe_price(price: Measurement) -> str:
    return ("~" if price.note == "extrapolated" else "") + format_cell(price.value)


def _make_caption(samples: Sequence[GridSample]) -> str:
    families, deviations = ", ".join(FAMILIES), ", ".join(map(str, ALIE_DEVIATIONS))
    counts = ((peer, *count_best(samples, peer)) for peer in PEERS)
    best = ", ".join(f"{peer} {hits} of {runs}" for peer, hits, runs in counts if runs)
    return (
        f"ms, max: milliseconds, median and maximum over inputs ({families}; several "
        f"seeds, ALIE with {deviations} deviations). Float32 vectors; the processor's "
        "time of one thread. / Gram, / BLAS: SMEA over its own Gram matrix, and over "
        "the bare float64 product of an array converted beforehand. numpy: how much "
        "longer SMEA takes without a compiler (isotropic vectors). brute force, ByzFL, "
        "ByzPy: how much longer they take; ~ extrapolated: their own code on 16 to 400 "
        "random subsets, times the number of subsets; absent: not installed (`make "
        "peers`). ByzFL gets numpy arrays or, for d >= 1,000, torch tensors: what is "
        f"faster for it. The best subset was the answer of: {best} whole calls."
    )


def make_panels(samples: Sequence[GridSample]) -> list[Panel]:
    """Return time against size, one panel for each dimension with several sizes."""
    panels = []
    for d, group in group_by(samples, lambda s: s.cell[2]).items():
        cells = {
            f"({n}, {f})": inputs
            for (n, f, _), inputs in group_by(group, lambda s: s.cell).items()
        }
        if len(cells) < 2:
            continue
        ours = {c: [s.seconds["SMEA"] for s in inputs] for c, inputs in cells.items()}
        series: dict[str, dict[str, float]] = {
            "SMEA": {cell: median(seconds) for cell, seconds in ours.items()},
            "SMEA, slowest input": {cell: max(each) for cell, each in ours.items()},
            "Gram matrix alone": {
                cell: median(s.seconds["gram"] for s in inputs)
                for cell, inputs in cells.items()
            },
        }
        for peer in PEERS:
            for cell, inputs in cells.items():
                prices = [s.prices[peer] for s in inputs if peer in s.prices]
                if prices:
                    far = any(price.extrapolated for price in prices)
                    line = series.setdefault(f"{peer}{EXTRAPOLATED if far else ''}", {})
                    line[cell] = median(price.seconds for price in prices)
        panels.append(
            Panel(f"One call, d = {d:,}", "(n, f)", "processor seconds", series)
        )
    return panels
