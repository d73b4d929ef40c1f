"""Two facts about spread, measured: ``python -m simulations.study spread``.

h clients send the same vector plus Gaussian noise. What does the noise add to the top
eigenvalue of their covariance, which SMEA's bound is in, and what to its trace, which
the bounds of the median, Krum and others are in? The rank of a covariance of h points,
h - 1, decides: beside it the dimension hardly counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flwr_safedshb.theory import heterogeneity, noise_spread
from simulations.results.plots import LOOKS, PANEL, STYLE
from simulations.results.tables import Table
from simulations.study import Runs, Section, Study, grid

CLIENTS = (4, 16, 64)
DIMENSIONS = (1, 3, 10, 30, 69, 100, 300, 1000, 3000, 10000)
SHOWN = (1, 10, 69, 1000)


def measure_spread(h: int, d: int, draws: int = 200, seed: int = 0) -> dict[str, float]:
    """Return means over draws of trace, lambda_max and their ratio; noise has std 1."""
    rng = np.random.default_rng([seed, h, d])
    found = []
    for _ in range(draws):
        total, top = heterogeneity(rng.normal(size=(h, d)))
        found.append((total**2, top**2, (total / top) ** 2))
    trace, top_eigenvalue, ratio = np.mean(found, axis=0)
    return {"trace": trace, "top_eigenvalue": top_eigenvalue, "ratio": ratio}


def read_metrics(runs: Runs[Any], h: int, d: int) -> tuple[float, float, float]:
    """Return trace, top eigenvalue and ratio."""
    (run,) = runs.where(h=str(h), d=str(d)).values()
    found = run["metrics"]
    return found["trace"], found["top_eigenvalue"], found["ratio"]


def tabulate_spread(runs: Runs[Any]) -> Table:
    """Return measured and predicted figures."""
    rows = []
    for h in map(int, runs.labels("h")):
        for d in SHOWN:
            trace, top, ratio = read_metrics(runs, h, d)
            exact, bound = noise_spread(h, d, 1.0)
            figures = (trace, exact, top, bound, ratio, min(d, h - 1))
            rows.append([f"{h}", f"{d}", *(f"{figure:.3g}" for figure in figures)])
    heads = ["clients h", "d", "trace", "d (1 - 1/h)", "top eigenvalue"]
    heads += ["at most (1 + √(d/h))²", "trace / top eigenvalue", "at most min(d, h-1)"]
    return Table(heads, rows)


def draw_spread(runs: Runs[Any]) -> Figure:
    """Draw both spreads, and their ratio, against the dimension."""
    with style.context(STYLE):
        drawn = Figure(figsize=(2 * PANEL[0], PANEL[1] * 1.15), layout="constrained")
        left, right = drawn.subplots(1, 2)
        every = np.array(DIMENSIONS)
        for look, h in zip(LOOKS[1:], CLIENTS, strict=False):
            found = np.array([read_metrics(runs, h, d) for d in DIMENSIONS])
            bounds = [noise_spread(h, d, 1.0)[1] for d in DIMENSIONS]
            marked = {"color": look.colour, "marker": look.marker, "markersize": 4}
            left.plot(every, found[:, 1], ls="", label=f"h = {h}", **marked)
            left.plot(every, bounds, look.line, color=look.colour, lw=1)
            right.plot(every, found[:, 2], ls="", label=f"h = {h}", **marked)
            most = np.minimum(every, h - 1)
            right.plot(every, most, look.line, color=look.colour, lw=1)
        left.plot(every, every, "--", color="0.4", lw=1, label="trace, about d")
        left.axhline(1.0, color="0.4", ls=":", lw=1, label="1, were it added once")
        right.plot(every, every, "--", color="0.4", lw=1, label="d")
        _label(left, "top eigenvalue of noise (lines: (1 + √(d/h))²)", (0.3, 2e4))
        _label(right, "trace over top eigenvalue (lines: min(d, h-1))", (0.7, 300))
    return drawn


def _label(axes: Axes, title: str, limits: tuple[float, float]) -> None:
    axes.set(xscale="log", yscale="log", xlabel="dimension d", ylim=limits)
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)


def report(runs: Runs[Any]) -> Iterator[Section]:
    """Yield the table and the picture."""
    yield Section(
        "Trace and top eigenvalue of noise",
        table=tabulate_spread(runs),
        figures={"spread": draw_spread(runs)},
    )


study = Study(
    "spread",
    "Two facts about spread",
    "What does noise add to the trace and to the top eigenvalue of a covariance?",
    grid(h=CLIENTS, d=DIMENSIONS),
    seeds=(0,),
    report=report,
    measure=measure_spread,
)
