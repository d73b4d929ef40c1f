"""How the cost of aggregation grows with n, d and f, beside what theory says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from flwr_safedshb.aggregation import Filter
from flwr_safedshb.aggregation.gram import gram, outermost_first
from flwr_safedshb.aggregation.smea.budget import NODE, WorkBudget
from flwr_safedshb.aggregation.smea.incumbent import find_incumbent
from flwr_safedshb.aggregation.smea.root_cases import decompose_scatter
from flwr_safedshb.aggregation.smea.search import improve_incumbent
from simulations.benchmarks.families import make_family
from simulations.benchmarks.measure import fit_exponent, median_in_turns
from simulations.benchmarks.plots import Panel
from simulations.benchmarks.result import Measurement, ResultTable, format_short

# Points of a curve that its exponent is fitted to: the last ones, where overheads are
# small.
FITTED = 3
MAX_NODES = 1_000_000


@dataclass(frozen=True)
class Growth:
    """A cost, in seconds or nodes of the search, against one size: n, d or f.

    `theory` is what the cost may be at each size. For times it goes through the last
    point with theory's exponent; for nodes it is the number of subsets.
    """

    what: str
    size: str
    words: str
    sizes: list[int]
    costs: list[float]
    theory: list[float]

    @property
    def exponent(self) -> float:
        """The power of the size that fits the last points."""
        return fit_exponent(self.sizes[-FITTED:], self.costs[-FITTED:])


def measure_growth(far: bool) -> list[Growth]:
    """Measure all curves, to large sizes or to small ones."""
    scale = 8 if far else 1
    n_gram, d_gram = [25, 50, 100, 50 * scale], [1000, 10_000, 100_000, 125_000 * scale]
    n_filter = [50, 100, 200, 100 * scale]
    return [
        _time_sizes("Gram matrix", "n", "d = 20,000", n_gram, 2.0, _gram_by_n),
        _time_sizes("Gram matrix", "d", "n = 50", d_gram, 1.0, _gram_by_d),
        _time_sizes("Filter after it", "n", "f = n/10", n_filter, 3.0, _filter_by_n),
        count_nodes(*((30, 12) if far else (20, 6))),
    ]


def _time_sizes(
    what: str,
    size: str,
    words: str,
    sizes: Sequence[int],
    exponent: float,
    make_call: Callable[[int], Callable[[], object]],
) -> Growth:
    sizes = sorted({*sizes})
    costs = [
        median_in_turns({what: make_call(value)}, enough=1.0, most=9)[what]
        for value in sizes
    ]
    theory = [costs[-1] * (value / sizes[-1]) ** exponent for value in sizes]
    return Growth(what, size, words, sizes, costs, theory)


def _gram_by_n(n: int) -> Callable[[], object]:
    return partial(gram, [[row] for row in make_family("isotropic", n, 1, 20_000, 0)])


def _gram_by_d(d: int) -> Callable[[], object]:
    return partial(gram, [[row] for row in make_family("isotropic", 50, 1, d, 0)])


def _filter_by_n(n: int) -> Callable[[], object]:
    vectors = make_family("alie", n, n // 10, 2000, seed=4)
    products = gram([[row] for row in vectors])
    return lambda: Filter().weigh(products, n // 10)


def count_nodes(n: int, most: int) -> Growth:
    """Count the nodes that the exact search visits, the first included, by f."""
    sizes = list(range(2, most + 1))
    costs = []
    for f in sizes:
        vectors = make_family("isotropic", n, f, 69, 0)
        distances, _ = outermost_first(gram([[row] for row in vectors]), n - f)
        budget = WorkBudget(MAX_NODES * NODE)
        best = find_incumbent(distances, n - f, budget)
        improve_incumbent(
            best, decompose_scatter(distances, budget), best.value, budget
        )
        costs.append(1.0 + budget.nodes)
    subsets = [float(math.comb(n, f)) for f in sizes]
    return Growth("SMEA's nodes", "f", f"n = {n}", sizes, costs, subsets)


def make_table(curves: Sequence[Growth]) -> ResultTable:
    """Return the ends of every curve, and its exponent beside theory's."""
    rows = []
    for curve in curves:
        timed = curve.size != "f"
        cost = (format_short(1e3 * c if timed else c) for c in curve.costs)
        first, *_, last = cost
        power = fit_exponent(curve.sizes, curve.theory)
        rows.append(
            (
                f"{curve.what}, {curve.words}",
                f"{curve.size} = {curve.sizes[0]:,} to {curve.sizes[-1]:,}",
                f"{first} to {last} {'ms' if timed else 'nodes'}",
                f"{curve.size}^{curve.exponent:.1f}" if timed else "",
                f"{curve.size}^{power:.0f}"
                if timed
                else f"<= {format_short(curve.theory[-1])}",
            )
        )
    return ResultTable("Growth", ("cost of", "for", "cost", "fitted", "theory"), rows)


def read_figures(curves: Sequence[Growth]) -> dict[str, Measurement]:
    """Return the exponents, and the largest share of all subsets that are searched."""
    figures = {}
    for curve in curves:
        if curve.size == "f":
            shares = [c / t for c, t in zip(curve.costs, curve.theory, strict=True)]
            note = f"{shares[-1]:.1g} at the largest f"
            figures[curve.what] = Measurement(max(shares), note)
        else:
            name = f"{curve.what}: exponent of {curve.size}"
            figures[name] = Measurement(curve.exponent, curve.words)
    return figures


def make_panels(curves: Sequence[Growth]) -> list[Panel]:
    """Return every curve beside its theory."""
    return [
        Panel(
            f"{curve.what}, {curve.words}",
            curve.size,
            "nodes" if curve.size == "f" else "seconds",
            {
                "measured": dict(zip(curve.sizes, curve.costs, strict=True)),
                "theory": dict(zip(curve.sizes, curve.theory, strict=True)),
            },
        )
        for curve in curves
    ]
