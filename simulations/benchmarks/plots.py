"""Bars and lines of the benchmarks, drawn from data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from simulations.results.plots import LOOKS, PANEL, STYLE

# Series whose name ends so are drawn hollow.
EXTRAPOLATED = ", extrapolated"


@dataclass(frozen=True)
class Panel:
    """One panel of a figure, with a logarithmic scale for the values.

    The series' sizes are numbers (a logarithmic scale, too) or words (in their order).
    """

    title: str
    sizes: str  # the labels of the axes
    values: str
    series: Mapping[
        str, Mapping[int, float] | Mapping[float, float] | Mapping[str, float]
    ]
    kind: Literal["lines", "bars"] = "lines"
    words: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        sizes = dict.fromkeys(size for line in self.series.values() for size in line)
        words = [size for size in sizes if isinstance(size, str)]
        object.__setattr__(self, "words", words)


def save_panels(panels: Sequence[Panel], path: Path) -> None:
    """Draw panels, two in a row, and write them as a PNG."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    with style.context(STYLE):
        size = (PANEL[0] * columns * 1.3, PANEL[1] * rows)
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).flat
        for axes in grid[len(panels) :]:
            axes.remove()
        for axes, panel in zip(grid, panels, strict=False):
            _draw_panel(axes, panel)
        figure.savefig(path, dpi=120)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    width = 0.8 / len(panel.series)
    for i, (name, line) in enumerate(panel.series.items()):
        look = LOOKS[(i + 1) % len(LOOKS)]
        sizes: list[float] = [
            panel.words.index(size) if isinstance(size, str) else size for size in line
        ]
        heights = np.array(list(line.values()))
        if panel.kind == "bars":
            bars = axes.bar(
                np.array(sizes) + i * width, heights, width, color=look.colour
            )
            axes.bar_label(bars, [f"{height:.3g}" for height in heights], fontsize=7)
            bars.set_label(name)
        else:
            face = "white" if name.endswith(EXTRAPOLATED) else look.colour
            axes.plot(
                sizes,
                heights,
                look.line,
                color=look.colour,
                marker=look.marker or ".",
                markerfacecolor=face,
                markersize=5,
                linewidth=1.2,
                label=name,
            )
    if panel.words:
        places = np.arange(len(panel.words)) + (width * (len(panel.series) - 1) / 2) * (
            panel.kind == "bars"
        )
        axes.set_xticks(places, panel.words, rotation=30, fontsize=8)
    else:
        axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set(title=panel.title, xlabel=panel.sizes, ylabel=panel.values)
    if len(panel.series) > 1:
        axes.legend(fontsize=7)
