"""Log-log figures of the measured errors, with what the theory predicts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, StrMethodFormatter

from simulations.results.intervals import estimate_means
from simulations.results.plots import LOOKS, PANEL, STYLE, save
from simulations.studies.trilemma.analysis import (
    REFERENCE,
    Measured,
    curve,
)
from simulations.studies.trilemma.points import RULES, Floats

UNBOUNDED = "average"
LOOK = dict(zip(RULES, LOOKS, strict=False))
AXES = {
    "d": "dimension d",
    "m": "examples of a client m",
    "epsilon": "epsilon",
    "n": "clients n, f/n fixed",
    "f": "adversaries f",
    "heterogeneity": "heterogeneity G",
}
# Exponents of the paper's terms, where one of them rules.
GUIDES = {"d": 1.0, "m": -2.0, "epsilon": -2.0, "n": -1.0, "heterogeneity": 2.0}


def draw(measured: Measured, folder: Path) -> None:
    """Draw all figures, as PNG and SVG."""
    sweeps = list(dict.fromkeys(cell.sweep for cell in measured.values()))
    plain = [sweep for sweep in sweeps if sweep.endswith("f = 0")]
    attacked = [sweep for sweep in sweeps if sweep not in plain]
    save(_panels(measured, plain, _errors), folder / "no-adversaries")
    save(_panels(measured, attacked, _errors), folder / "under-attack")
    ratios = sorted(sweep for sweep in attacked if sweep in ("d", "n"))
    save(_panels(measured, ratios, _ratios), folder / "separation")


Fill = Callable[[Axes, Measured, str], None]


def _panels(measured: Measured, sweeps: list[str], fill: Fill) -> Figure:
    columns = min(3, len(sweeps))
    rows = -(-len(sweeps) // columns)
    with style.context(STYLE):
        size = (PANEL[0] * columns * 0.9, PANEL[1] * rows)
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).flat
        for axes, sweep in zip(grid, sweeps, strict=False):
            fill(axes, measured, sweep)
            axes.set_xscale("log")
            values = [cell.value for cell in curve(measured, sweep, REFERENCE)]
            axes.set_xticks(values, [f"{value:g}" for value in values], minor=False)
            axes.xaxis.set_minor_locator(NullLocator())
        handles, names = grid[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=4)
    return figure


def _errors(axes: Axes, measured: Measured, sweep: str) -> None:
    """Draw errors under the strongest attack, what is proved, and what noise costs."""
    plain = sweep.endswith("f = 0")
    for rule in RULES:
        cells = curve(measured, sweep, rule)
        # Under attack the average has no bound, and would leave no room for the others.
        if plain or rule != UNBOUNDED:
            _line(axes, rule, [c.value for c in cells], [c.worst for c in cells])
    cells = curve(measured, sweep, REFERENCE)
    values = np.array([cell.value for cell in cells])
    noise = np.array([cell.point.privacy_only for cell in cells])
    bounds = np.array([cell.bound for cell in cells])
    axes.plot(values, noise, color="0.45", lw=1, label="honest noise alone")
    if not plain:
        axes.plot(values, bounds, ":", color="0.45", lw=1.4, label="proved for SMEA")
    quantity = sweep.removesuffix(", f = 0")
    title = "without adversaries" if plain else "under the strongest attack"
    if quantity in GUIDES:
        title += f": predicted slope {GUIDES[quantity]:+g}"
        _guide(axes, values, bounds, GUIDES[quantity])
    axes.set(xlabel=AXES[quantity], ylabel="squared error", yscale="log")
    axes.set_title(title, fontsize=9)


def _ratios(axes: Axes, measured: Measured, sweep: str) -> None:
    """Draw errors over the privacy-only error."""
    for rule in RULES:
        if rule == UNBOUNDED:
            continue
        cells = curve(measured, sweep, rule)
        ratios = [cell.worst / cell.point.privacy_only for cell in cells]
        _line(axes, rule, [cell.value for cell in cells], ratios)
    cells = curve(measured, sweep, REFERENCE)
    bounds = [cell.bound / cell.point.privacy_only for cell in cells]
    values = [cell.value for cell in cells]
    axes.plot(values, bounds, ":", color="0.45", lw=1.4, label="proved for SMEA")
    axes.axhline(1.0, color="0.45", lw=1, label="honest noise alone")
    others = cells[-1].point
    fixed = f"d = {others.d}" if sweep == "n" else f"n = {others.n}"
    axes.set(xlabel=AXES[sweep], ylabel="error / (d sigma² / (n-f))")
    axes.set_title(f"f/n = {others.f / others.n:g}, {fixed}", fontsize=9)
    axes.set_ylim(0.8, 1.2 * axes.get_ylim()[1])
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _line(axes: Axes, rule: str, values: list[float], samples: list[Floats]) -> None:
    """Draw means, and their intervals as shades."""
    look = LOOK[rule]
    found = estimate_means(np.stack(samples, axis=1))
    low, high = ([each[end] for each in found] for end in ("low", "high"))
    axes.plot(
        values,
        [each["value"] for each in found],
        look.line,
        color=look.colour,
        marker=look.marker,
        markersize=4,
        linewidth=1.5,
        label=rule,
    )
    axes.fill_between(values, low, high, color=look.colour, alpha=0.18, linewidth=0)


def _guide(axes: Axes, values: Floats, bounds: Floats, exponent: float) -> None:
    """Draw the predicted slope over the upper half of the values."""
    x = values[len(values) // 2 :]
    y = 3.0 * bounds[len(values) // 2] * (x / x[0]) ** exponent
    axes.plot(x, y, "-", color="0.7", lw=3, alpha=0.6, label="predicted slope")
