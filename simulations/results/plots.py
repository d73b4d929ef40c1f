"""Curves and strips, as PNG and SVG: readable without colour, and on a phone.

Colours are Okabe and Ito's, which people with any colour vision can tell apart; line
styles differ, too.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from numpy.typing import NDArray

Floats = NDArray[np.float64]

STYLE = {
    "font.size": 10,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "legend.frameon": False,
    # Text stays text, and the same figure gives the same bytes.
    "svg.fonttype": "none",
    "svg.hashsalt": "safedshb",
}
# From here on values that one scale must hold are drawn on a logarithmic one.
WIDE = 10.0
LABELS = {"accuracy": "test accuracy", "training_loss": "training loss"}
PANEL = (4.6, 3.4)


@dataclass(frozen=True)
class Look:
    """How a method is drawn; `marker` stands at every tenth value."""

    colour: str
    line: str
    marker: str


LOOKS = (
    Look("#000000", "--", ""),
    Look("#0072B2", "-", "o"),
    Look("#D55E00", "-", "s"),
    Look("#009E73", ":", "^"),
    Look("#CC79A7", "-.", "v"),
    Look("#56B4E9", "-", "D"),
    Look("#E69F00", "--", "P"),
    Look("#888888", "-.", "X"),
    Look("#6A3D9A", "-", "*"),
)


@dataclass(frozen=True)
class Curve:
    """A quantity against the step, for some seeds.

    Attributes
    ----------
    steps : (k,) array
    values : (seeds, k) array
    """

    steps: Floats
    values: Floats


def draw(axes: Axes, curves: Mapping[str, Curve], quantity: str, title: str) -> None:
    """Draw means as lines, and one standard deviation around them as shades."""
    for i, (name, curve) in enumerate(curves.items()):
        look = LOOKS[i % len(LOOKS)]
        mean = curve.values.mean(axis=0)
        spread = curve.values.std(axis=0, ddof=min(1, len(curve.values) - 1))
        axes.plot(
            curve.steps,
            mean,
            look.line,
            color=look.colour,
            marker=look.marker,
            markevery=(i, max(1, len(mean) // 8)),
            markersize=4,
            linewidth=1.6,
            label=name,
        )
        axes.fill_between(
            curve.steps,
            mean - spread,
            mean + spread,
            color=look.colour,
            alpha=0.18,
            linewidth=0,
        )
    axes.set(title=title, xlabel="step", ylabel=LABELS.get(quantity, quantity))
    axes.margins(x=0.01)


def panel(curves: Mapping[str, Curve], quantity: str, title: str) -> Figure:
    """Return a figure of one panel."""
    return panels({title: curves}, quantity)


def panels(
    content: Mapping[str, Mapping[str, Curve]], quantity: str, columns: int = 2
) -> Figure:
    """Return a figure of panels with a common scale and one legend."""
    columns = min(columns, len(content))
    rows = -(-len(content) // columns)
    with style.context(STYLE):
        figure = Figure(
            figsize=(PANEL[0] * columns, PANEL[1] * rows), layout="constrained"
        )
        grid = figure.subplots(rows, columns, sharey=True, squeeze=False).flat
        for axes, (title, curves) in zip(grid, content.items(), strict=False):
            draw(axes, curves, quantity, title)
            axes.label_outer()
        all_curves = [each for curves in content.values() for each in curves.values()]
        means = np.concatenate([each.values.mean(axis=0) for each in all_curves])
        if quantity == "training_loss" and means.max() > WIDE * means.min():
            grid[0].set_yscale("log")  # and all, which share it
            grid[0].yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            grid[0].yaxis.set_major_formatter("{x:g}")
            grid[0].yaxis.set_minor_formatter(NullFormatter())
        handles, names = grid[0].get_legend_handles_labels()
        # As many names in a row as there is room for.
        width = min(len(names), 2 * columns + columns // 2)
        figure.legend(handles, names, loc="outside lower center", ncols=width)
    return figure


def strip(shares: Floats, names: Sequence[str], last_step: int) -> Figure:
    """Return a heat strip: how often each node was left out of the aggregate.

    Parameters
    ----------
    shares : (nodes, bins) array
        From 0 to 1, over bins of steps; NaN where nothing is known.
    names : sequence of str
    last_step : int
        Where the last bin ends.
    """
    with style.context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(PANEL[0] * 1.4, 0.9 + 0.28 * len(names)))
        figure.set_layout_engine("constrained")
        axes = figure.subplots()
        image = axes.imshow(
            shares,
            aspect="auto",
            interpolation="nearest",
            cmap="cividis",
            vmin=0.0,
            vmax=1.0,
            extent=(0, last_step, len(names) - 0.5, -0.5),
        )
        axes.set_yticks(range(len(names)), names)
        axes.set(xlabel="step")
        figure.colorbar(image, label="share left out", pad=0.02)
    return figure


def heatmap(
    values: Floats, rows: Sequence[str], columns: Sequence[str], title: str
) -> Figure:
    """Return values, (rows, columns), as colours on a logarithmic scale, and written.

    Parameters
    ----------
    values : (rows, columns) array
        Above 0.
    rows, columns : sequence of str
    title : str
    """
    with style.context({**STYLE, "axes.grid": False}):
        size = (4.0 + 0.75 * len(columns), 1.6 + 0.32 * len(rows))
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        shades = np.log10(values)
        image = axes.imshow(values, aspect="auto", cmap="cividis", norm=LogNorm())
        axes.set_xticks(range(len(columns)), columns, rotation=45, ha="right")
        axes.set_yticks(range(len(rows)), rows)
        axes.set(title=title)
        middle = (shades.max() + shades.min()) / 2
        for (i, j), value in np.ndenumerate(values):
            colour = "white" if shades[i, j] < middle else "black"
            text = f"{value:.2g}"
            axes.text(j, i, text, ha="center", va="center", color=colour, fontsize=8)
        bar = figure.colorbar(image, pad=0.02)
        # The numbers of the cells; their distances are those of their logarithms.
        bar.ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        bar.ax.yaxis.set_major_formatter("{x:g}")
        bar.ax.yaxis.set_minor_formatter(NullFormatter())
    return figure


def save(figure: Figure, stem: Path) -> None:
    """Write a figure as PNG and SVG."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    with style.context(STYLE):
        figure.savefig(stem.with_suffix(".png"), dpi=150)
    stem.with_suffix(".svg").write_text(svg(figure))


def svg(figure: Figure) -> str:
    """Return a figure as SVG, the same text for the same figure."""
    buffer = io.StringIO()
    with style.context(STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
