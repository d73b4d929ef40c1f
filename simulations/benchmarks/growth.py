"""How the cost of aggregation grows with n, d and f, beside what theory says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from flwr_safedshb.aggregation import Filter
from flwr_safedshb.aggregation.gram import gram_matrix
from flwr_safedshb.aggregation.scatter import sort_by_isolation
from flwr_safedshb.aggregation.smea.budget import NODE, WorkBudget
from flwr_safedshb.aggregation.smea.incumbent import find_incumbent
from flwr_safedshb.aggregation.smea.root_cases import decompose_scatter
from flwr_safedshb.aggregation.smea.search import improve_incumbent
from simulations.benchmarks.families import make_family
from simulations.benchmarks.measure import fit_exponent, median_in_turns
from simulations.benchmarks.plots import Panel
from simulations.benchmarks.result import Measurement, ResultTable

# Points of a curve that its exponent is fitted to: the last ones, where overheads are
# small.
FITTED = 3
MAX_NODES = 1_000_000


@dataclass(frozen=True)
class Growth:
    """A cost against one size, beside what theory allows.

    For seconds that is theory's power through the last point, for nodes the number of
    subsets.
    """

    figure: str  # whose threshold it has
    words: str  # what is held fixed
    unit: str
    size: str  # n, d or f
    costs: dict[int, float]
    theory: dict[int, float]

    @property
    def measured(self) -> float:
        """The fitted exponent, or the largest share of theory's bound."""
        if self.unit == "s":
            sizes, costs = list(self.costs), list(self.costs.values())
            return fit_exponent(sizes[-FITTED:], costs[-FITTED:])
        return max(cost / self.theory[size] for size, cost in self.costs.items())


def measure_growth(far: bool) -> list[Growth]:
    """Measure all curves, to large sizes or to small ones."""
    scale = 8 if far else 1
    gram_n, gram_d = [25, 50, 100, 50 * scale], [1000, 10_000, 100_000, 125_000 * scale]
    filter_n = [50, 100, 200, 100 * scale]
    gram, filter_ = "Gram matrix: exponent of", "Filter after it: exponent of"
    return [
        _time_sizes(f"{gram} n", "d = 20,000", "n", gram_n, 2.0, _make_gram_by_n),
        _time_sizes(f"{gram} d", "n = 50", "d", gram_d, 1.0, _make_gram_by_d),
        _time_sizes(f"{filter_} n", "f = n/10", "n", filter_n, 3.0, _make_filter),
        count_nodes(*((30, 12) if far else (20, 6))),
    ]


def _time_sizes(
    figure: str,
    words: str,
    size: str,
    sizes: Sequence[int],
    exponent: float,
    make_call: Callable[[int], Callable[[], object]],
) -> Growth:
    costs = {
        value: median_in_turns({"": make_call(value)}, enough=1.0, most=9)[""]
        for value in sorted({*sizes})
    }
    largest = max(costs)
    theory = {n: costs[largest] * (n / largest) ** exponent for n in costs}
    return Growth(figure, words, "s", size, costs, theory)


def _make_gram_by_n(n: int) -> Callable[[], object]:
    return partial(
        gram_matrix, [[row] for row in make_family("isotropic", n, 1, 20_000, 0)]
    )


def _make_gram_by_d(d: int) -> Callable[[], object]:
    return partial(
        gram_matrix, [[row] for row in make_family("isotropic", 50, 1, d, 0)]
    )


def _make_filter(n: int) -> Callable[[], object]:
    vectors = make_family("alie", n, n // 10, 2000, seed=4)
    return partial(Filter().weigh, gram_matrix([[row] for row in vectors]), n // 10)


def count_nodes(n: int, most: int) -> Growth:
    """Count the nodes that the exact search visits, the first included, by f."""
    costs = {}
    for f in range(2, most + 1):
        vectors = make_family("isotropic", n, f, 69, 0)
        distances, _ = sort_by_isolation(gram_matrix([[row] for row in vectors]), n - f)
        budget = WorkBudget(MAX_NODES * NODE)
        best = find_incumbent(distances, n - f, budget)
        spectrum = decompose_scatter(distances, budget)
        improve_incumbent(best, spectrum, best.value, budget)
        costs[f] = 1.0 + budget.nodes
    subsets = {f: float(math.comb(n, f)) for f in costs}
    return Growth("SMEA's nodes", f"n = {n}", "nodes", "f", costs, subsets)


def make_table(curves: Sequence[Growth]) -> ResultTable:
    """Return the ends of every curve, and what theory allows at the last."""
    rows = [
        (
            *(f"{curve.figure}, {curve.words}", f"{min(curve.costs):,}"),
            *(curve.costs[min(curve.costs)], f"{max(curve.costs):,}"),
            *(curve.costs[max(curve.costs)], curve.unit, curve.measured),
        )
        for curve in curves
    ]
    heads = ("cost of", "from", "cost", "to", "cost", "unit", "measured")
    words = "measured: the fitted exponent, or the largest share of all subsets."
    return ResultTable("Growth", heads, rows, words)


def read_figures(curves: Sequence[Growth]) -> dict[str, Measurement]:
    """Return the exponents, and the largest share of all subsets that are searched."""
    return {curve.figure: Measurement(curve.measured, curve.words) for curve in curves}


def make_panels(curves: Sequence[Growth]) -> list[Panel]:
    """Return every curve beside its theory."""
    return [
        Panel(
            f"{curve.figure}, {curve.words}",
            curve.size,
            curve.unit,
            {"measured": curve.costs, "theory": curve.theory},
        )
        for curve in curves
    ]
