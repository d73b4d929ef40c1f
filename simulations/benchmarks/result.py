"""The result of one benchmark: compared with its thresholds, shown and kept.

A benchmark is a module with ``measure(quick) -> Result`` and an entry in
`thresholds.BENCHMARKS`; `run_benchmark` makes it a command.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from simulations.benchmarks.plots import Panel, save_panels
from simulations.benchmarks.thresholds import BENCHMARKS
from simulations.command import Parser, prepare_folder, print_settings_errors
from simulations.results.machine import machine
from simulations.results.tables import format_markdown as markdown_table

OUT = Path("outputs/benchmarks")
MET, MISSED, NOT_MEASURED = "met", "MISSED", "not measured"
THRESHOLD_HEADS = ("threshold", "measured", "bound", "verdict", "note")


@dataclass(frozen=True)
class Measurement:
    """A number that a threshold bounds, and a note on where it comes from."""

    value: float
    note: str = ""


TableRow = Sequence[str | float | None]  # None: an empty cell


@dataclass(frozen=True)
class ResultTable:
    """What was measured; the first column names the row."""

    title: str
    heads: Sequence[str]
    rows: Sequence[TableRow]
    caption: str = ""


@dataclass(frozen=True)
class Result:
    """What one run of a benchmark found."""

    tables: Sequence[ResultTable]
    figures: Mapping[str, Measurement]  # by the names of their thresholds
    # The few figures that are kept from version to version; less is better in all of
    # them, and a ratio to a lower bound or a peer says more than seconds.
    costs: Mapping[str, float]
    raw: object  # everything that was measured; JSON
    panels: Sequence[Panel] = field(default=(), repr=False)


def compare_thresholds(name: str, figures: Mapping[str, Measurement]) -> ResultTable:
    """Return every threshold of a benchmark beside what was measured.

    Raises
    ------
    ValueError
        If a figure has no threshold: one of the two has been renamed.
    """
    thresholds = BENCHMARKS[name].thresholds
    if unknown := figures.keys() - {threshold.figure for threshold in thresholds}:
        raise ValueError(f"{name}: no threshold is named {sorted(unknown)}; add them")
    rows: list[TableRow] = []
    for threshold in thresholds:
        figure = figures.get(threshold.figure)
        if figure is None:
            rows.append((threshold.figure, None, str(threshold), NOT_MEASURED, None))
            continue
        verdict = MET if threshold.holds(figure.value) else MISSED
        value, note = figure.value, figure.note
        rows.append((threshold.figure, value, str(threshold), verdict, note))
    return ResultTable("Thresholds", THRESHOLD_HEADS, rows)


def format_cell(cell: str | float | None) -> str:
    """Write a number with three digits that matter, or 1.2e7; words as they are."""
    if not isinstance(cell, int | float):
        return cell or ""
    if abs(cell) >= 99_999.5:
        digits, _, power = f"{cell:.1e}".partition("e")
        return f"{digits.removesuffix('.0')}e{int(power)}"
    return f"{cell:,.0f}" if abs(cell) >= 99.95 else f"{cell:.3g}"


def format_markdown(title: str, tables: Sequence[ResultTable], words: str = "") -> str:
    """Return a section in Markdown, for the terminal and for the documentation."""
    blocks = [f"### {escape(title)}", *([words] if words else [])]
    for table in tables:
        heads, *rows = (
            [escape(format_cell(cell)).replace("|", "\\|") for cell in line]
            for line in (table.heads, *table.rows)
        )
        blocks += [f"**{escape(table.title)}**", "\n".join(markdown_table(heads, rows))]
        if table.caption:
            blocks.append(escape(table.caption))
    return "\n\n".join(blocks)


def write_result(folder: Path, name: str, result: Result) -> list[ResultTable]:
    """Write JSON with the machine of the figures, and a PNG; return all tables."""
    tables = [*result.tables, compare_thresholds(name, result.figures)]
    content = {
        "title": BENCHMARKS[name].title,
        "machine": machine(),
        "tables": [asdict(table) for table in tables],
        "costs": result.costs,
        "raw": result.raw,
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content, indent=2) + "\n")
    if result.panels:
        save_panels(result.panels, path.with_suffix(".png"))
    return tables


@print_settings_errors
def run_benchmark(name: str, arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark as a command: measure, print, write."""
    parser = Parser(description=f"Benchmark: {BENCHMARKS[name].title}.")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, to see that it runs"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="directory")
    options = parser.parse_args(arguments)
    prepare_folder(options.out)
    # By its name, so that new processes find its functions.
    module = importlib.import_module(f"simulations.benchmarks.{name}")
    result: Result = module.measure(options.quick)
    tables = write_result(options.out, name, result)
    console = Console()
    console.print(Markdown(format_markdown(BENCHMARKS[name].title, tables)))
    console.print(f"Written: {options.out / name}.json", highlight=False)
    return 0
