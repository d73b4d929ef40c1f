"""Tables and a figure of what the aggregation benchmark measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import FigureBase

from simulations.benchmarks.cells import Cell, Sample
from simulations.benchmarks.families import ALIE_DEVIATIONS, FAMILIES
from simulations.benchmarks.outcome import Table, short
from simulations.benchmarks.processes import CompilerTimes
from simulations.benchmarks.targets import (
    extrapolated,
    finds,
    grouped,
    ratio,
    speedup,
)

RIVALS = ("brute force", "ByzFL", "ByzPy")
# Seconds that help to read a figure.
MARKS = {"1 second": 1.0, "1 hour": 3600.0, "1 year": 3.15e7, "1,000 years": 3.15e10}


def size(cell: Cell) -> str:
    """Write a cell in words."""
    return f"({cell[0]}, {cell[1]}), d = {cell[2]:,}"


def tables(
    samples: Sequence[Sample],
    compiler: Mapping[Cell, CompilerTimes],
    first_calls: tuple[float, float] | None,
) -> list[Table]:
    """Return times and ratios, a table for each dimension, and what they mean."""
    heads = ("n, f", "subsets", "ms", "max", "/ Gram", "/ BLAS", "numpy", *RIVALS)
    found = [
        Table(
            f"One call of SMEA, d = {short(d)}, and how many times longer others take",
            heads,
            [
                _row(cell, inputs, compiler.get(cell))
                for cell, inputs in grouped((s.cell, s) for s in group)
            ],
        )
        for d, group in grouped((s.d, s) for s in samples)
    ]
    return [*found[:-1], replace(found[-1], caption=_caption(samples, first_calls))]


def _row(
    cell: Cell, group: Sequence[Sample], compiler: CompilerTimes | None
) -> list[str]:
    n, f, _ = cell
    seconds = [s.seconds["SMEA"] for s in group]
    return [
        f"{n}, {f}",
        short(math.comb(n, f)),
        *(_milliseconds(value) for value in (median(seconds), max(seconds))),
        *(short(ratio(group, "SMEA", floor)) for floor in ("gram", "BLAS")),
        "" if compiler is None else short(compiler["without"] / compiler["with"]),
        *(_speedup(group, rival) for rival in RIVALS),
    ]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}" if seconds < 0.01 else f"{1e3 * seconds:,.0f}"


def _speedup(group: Sequence[Sample], rival: str) -> str:
    value = speedup(group, rival)
    if value is None:
        return "absent"
    return ("~" if extrapolated(group, rival) else "") + short(value)


def _caption(samples: Sequence[Sample], first_calls: tuple[float, float] | None) -> str:
    counts = ", ".join(
        f"{who} {hits} of {n}" for who, (hits, n) in finds(samples).items()
    )
    families, deviations = ", ".join(FAMILIES), ", ".join(map(str, ALIE_DEVIATIONS))
    lines = [
        f"ms, max: milliseconds, median and maximum over inputs ({families}; several "
        f"seeds, ALIE with {deviations} deviations). Float32 vectors; the processor's "
        "time of one thread.",
        "/ Gram, / BLAS: SMEA over its own Gram matrix, and over the bare float64 "
        "product of an array converted beforehand. eig: eigvalsh of one n x n matrix.",
        "numpy: how much longer SMEA takes without a compiler (isotropic vectors).",
        "brute force, ByzFL, ByzPy: how much longer they take. ~ extrapolated: their "
        "own code on 16 to 400 random subsets, times the number of subsets. ByzFL gets "
        "numpy arrays or, for d >= 1,000, torch tensors: what is faster for it.",
        f"The best subset was the answer of: {counts} whole calls.",
    ]
    if len({who for s in samples for who in s.prices}) < len(RIVALS):
        lines.append("absent: not installed; `make peers` does it.")
    if first_calls is not None:
        cold, warm = first_calls
        lines.append(
            f"Not in the times: a first search compiles for {cold:.1f} s, once on a "
            f"machine, and loads that for {warm:.1f} s, once in a process."
        )
    return "\n".join(lines)


def plot(
    figure: FigureBase,
    samples: Sequence[Sample],
    compiler: Mapping[Cell, CompilerTimes],
) -> None:
    """Draw time against size, one panel for each dimension with several sizes."""
    panels = [
        (d, cells)
        for d, group in grouped((s.d, s) for s in samples)
        if len(cells := grouped((s.cell, s) for s in group)) > 1
    ]
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for axis, (d, cells) in zip(axes[0], panels, strict=True):
        _panel(axis, cells, compiler)
        axis.set_title(f"d = {d:,}")
        axis.set_xlabel("(n, f)")
    axes[0][0].set_ylabel("processor seconds for one call")
    figure.legend(
        *axes[0][0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    figure.suptitle("Hollow: extrapolated. SMEA at (100, 10) has a time limit of 10 s")


def _panel(
    axis: Axes,
    cells: Sequence[tuple[Cell, list[Sample]]],
    compiler: Mapping[Cell, CompilerTimes],
) -> None:
    for words, seconds in MARKS.items():
        axis.axhline(seconds, color="0.85", linewidth=0.8, zorder=0)
        axis.text(0, seconds, words, color="0.5", fontsize=7, va="bottom")
    for color, rival in zip(("C1", "C3", "C2"), RIVALS, strict=True):
        _rival(axis, cells, rival, color)
    at = range(len(cells))
    ours = [[s.seconds["SMEA"] for s in group] for _, group in cells]
    axis.fill_between(
        at, [min(o) for o in ours], [max(o) for o in ours], color="C0", alpha=0.25
    )
    axis.plot(
        at,
        [median(o) for o in ours],
        "o-",
        color="C0",
        label="SMEA; shaded: all inputs",
    )
    without = [
        (i, compiler[cell]["without"])
        for i, (cell, _) in enumerate(cells)
        if cell in compiler
    ]
    if without:
        axis.plot(
            *zip(*without, strict=True),
            "x:",
            color="C0",
            label="SMEA without a compiler",
        )
    floor = [median(s.seconds["gram"] for s in group) for _, group in cells]
    axis.plot(at, floor, "k--", linewidth=1, label="Gram matrix alone")
    axis.set_yscale("log")
    axis.set_xticks(at, [f"({n}, {f})" for (n, f, _), _ in cells], rotation=45)


def _rival(
    axis: Axes, cells: Sequence[tuple[Cell, list[Sample]]], rival: str, color: str
) -> None:
    """Draw a rival's times, hollow where they are extrapolated."""
    points = [
        (i, median(p.seconds for p in prices), any(p.extrapolated for p in prices))
        for i, (_, group) in enumerate(cells)
        if (prices := [s.prices[rival] for s in group if rival in s.prices])
    ]
    axis.plot(*_line(points), "-", color=color, linewidth=1)
    for hollow, face, words in ((False, color, rival), (True, "white", None)):
        chosen = _line([point for point in points if point[2] is hollow])
        axis.plot(*chosen, "s", color=color, markerfacecolor=face, label=words)


def _line(points: Sequence[tuple[int, float, bool]]) -> tuple[list[int], list[float]]:
    return [i for i, _, _ in points], [seconds for _, seconds, _ in points]
