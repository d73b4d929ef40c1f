"""How the cost of aggregation grows with n, d and f, beside what theory says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase

from flwr_safedshb.aggregation import Filter
from flwr_safedshb.aggregation.gram import gram, outermost_first
from flwr_safedshb.aggregation.smea.budget import NODE, WorkBudget
from flwr_safedshb.aggregation.smea.incumbent import find_incumbent
from flwr_safedshb.aggregation.smea.root_cases import decompose_scatter
from flwr_safedshb.aggregation.smea.search import improve_incumbent
from simulations.benchmarks.cells import warm_up
from simulations.benchmarks.families import family
from simulations.benchmarks.measure import in_turns
from simulations.benchmarks.outcome import Check, Table, short

# A slope may exceed the theory's by so much: points are few, and caches have sizes.
TOLERANCE = 0.35
# Points of a curve that its slope is fitted to: the last ones, where overheads are
# small.
FITTED = 3
MAX_NODES = 1_000_000


@dataclass(frozen=True)
class Growth:
    """A cost against one size.

    Attributes
    ----------
    what : str
    size : str
        What grows: "n", "d" or "f".
    sizes, costs : list
        Costs in seconds, or in nodes of the search for "f".
    theory : float or list
        The exponent of a power, or an upper bound on each cost.
    """

    what: str
    size: str
    sizes: list[int]
    costs: list[float]
    theory: float | list[float]

    @property
    def slope(self) -> float:
        """Exponent of a power fitted to the last points."""
        x, y = (np.log(values[-FITTED:]) for values in (self.sizes, self.costs))
        return float(np.polyfit(x, y, 1)[0])


def growths(far: bool) -> list[Growth]:
    """Measure all curves, to large sizes or to small ones."""
    scale = 8 if far else 1
    return [
        _timed(
            "Gram matrix, d = 20,000", "n", [25, 50, 100, 50 * scale], 2.0, _gram_by_n
        ),
        _timed(
            "Gram matrix, n = 50",
            "d",
            [1000, 10_000, 100_000, 125_000 * scale],
            1.0,
            _gram_by_d,
        ),
        _timed(
            "Filter after it, f = n/10",
            "n",
            [50, 100, 200, 100 * scale],
            3.0,
            _filter_by_n,
        ),
        nodes_by_f(*((30, 12) if far else (20, 6))),
    ]


def _timed(
    what: str,
    size: str,
    sizes: Sequence[int],
    theory: float,
    call: Callable[[int], Callable[[], object]],
) -> Growth:
    sizes = sorted({*sizes})
    seconds = []
    for value in sizes:
        turns = in_turns({what: call(value)}, enough=1.0, most=9)
        seconds.append(median(turns[what]))
    return Growth(what, size, sizes, seconds, theory)


def _gram_by_n(n: int) -> Callable[[], object]:
    return partial(gram, [[row] for row in family("isotropic", n, 1, 20_000, 0)])


def _gram_by_d(d: int) -> Callable[[], object]:
    return partial(gram, [[row] for row in family("isotropic", 50, 1, d, 0)])


def _filter_by_n(n: int) -> Callable[[], object]:
    vectors = family("alie", n, n // 10, 2000, seed=4)
    products = gram([[row] for row in vectors])
    return lambda: Filter().weigh(products, n // 10)


def nodes_by_f(n: int, most: int) -> Growth:
    """Count the nodes of the search; every subset is a leaf of the whole tree."""
    warm_up()
    sizes = list(range(2, most + 1))
    costs = [float(nodes(n, f)) for f in sizes]
    subsets = [float(math.comb(n, f)) for f in sizes]
    return Growth(f"SMEA's nodes, n = {n}", "f", sizes, costs, subsets)


def nodes(n: int, f: int) -> int:
    """Return the nodes that the exact search visits, the first included."""
    vectors = family("isotropic", n, f, 69, 0)
    distances, _ = outermost_first(gram([[row] for row in vectors]), n - f)
    budget = WorkBudget(MAX_NODES * NODE)
    best = find_incumbent(distances, n - f, budget)
    spectrum = decompose_scatter(distances, budget)
    improve_incumbent(best, spectrum, best.value, budget)
    return 1 + budget.nodes


def table(curves: Sequence[Growth]) -> Table:
    """Return the ends of every curve and its exponent."""
    rows = []
    for curve in curves:
        seconds = curve.size != "f"
        first, last = (_cost(curve.costs[i], seconds) for i in (0, -1))
        rows.append(
            (
                curve.what,
                f"{curve.size} = {curve.sizes[0]:,} to {curve.sizes[-1]:,}",
                f"{first} to {last}",
                f"{curve.size}^{curve.slope:.1f}" if seconds else "",
                _theory(curve),
            )
        )
    return Table("Growth", ("cost of", "for", "cost", "fitted", "theory"), rows)


def _cost(value: float, seconds: bool) -> str:
    return f"{1e3 * value:,.3g} ms" if seconds else f"{value:,.0f}"


def _theory(curve: Growth) -> str:
    if isinstance(curve.theory, list):
        return f"<= {short(curve.theory[-1])}"
    return f"{curve.size}^{curve.theory:.0f}"


def checks(curves: Sequence[Growth]) -> list[Check]:
    """Check that no cost grows faster than it should."""
    found = []
    for curve in curves:
        if isinstance(curve.theory, list):
            worst = max(c / t for c, t in zip(curve.costs, curve.theory, strict=True))
            found.append(
                Check(
                    curve.what,
                    f"{worst:.2g}",
                    "<= 1 of the subsets",
                    worst <= 1.0,
                    f"{curve.costs[-1] / curve.theory[-1]:.1g} at the largest f",
                )
            )
            continue
        found.append(
            Check(
                f"{curve.what}: growth with {curve.size}",
                f"{curve.size}^{curve.slope:.2f}",
                f"{curve.size}^{curve.theory:.0f}",
                curve.slope <= curve.theory + TOLERANCE,
            )
        )
    return found


def plot(figure: FigureBase, curves: Sequence[Growth]) -> None:
    """Draw every curve beside its theory, on logarithmic axes."""
    for axes, curve in zip(figure.subplots(1, len(curves)), curves, strict=True):
        _panel(axes, curve)


def _panel(axes: Axes, curve: Growth) -> None:
    x, y = np.array(curve.sizes, float), np.array(curve.costs)
    axes.plot(x, y, "o-", color="#0072B2", label="measured")
    if isinstance(curve.theory, list):
        axes.plot(x, curve.theory, "k--", linewidth=1, label="all subsets")
        axes.set_ylabel("nodes")
    else:
        power = y[-1] * (x / x[-1]) ** curve.theory
        label = f"{curve.size}^{curve.theory:.0f}"
        axes.plot(x, power, "k--", linewidth=1, label=label)
        axes.set_xscale("log")
        axes.set_ylabel("seconds")
    axes.set_yscale("log")
    axes.set_xlabel(curve.size)
    axes.set_title(curve.what, fontsize=9)
    axes.legend(fontsize=8)
