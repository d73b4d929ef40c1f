"""What every benchmark answers with, and how it is shown and kept.

A benchmark is a module with ``run(quick) -> Outcome``; `main` makes it a command. Every
target is a ratio to something measured in the same run, with its bound beside it, and
nothing is asserted: a busy machine may miss a bound that a quiet one meets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from matplotlib import style
from matplotlib.figure import Figure
from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table as RichTable

from simulations.command import Parser, prepare_folder, print_settings_errors
from simulations.results.machine import machine
from simulations.results.plots import STYLE

OUT = Path("outputs/benchmarks")


@dataclass(frozen=True)
class Check:
    """A figure beside its bound, as they are printed."""

    what: str
    measured: str
    bound: str
    holds: bool
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Figures as they are printed; the first column names the row.

    Attributes
    ----------
    title : str
    heads : sequence of str
    rows : sequence of sequences of str
    caption : str
        What the columns mean.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Outcome:
    """What one run of a benchmark found.

    Attributes
    ----------
    name : str
        Of the module; its files are named after it.
    title : str
        Of its section on the page.
    tables : sequence of Table
    checks : sequence of Check
        The targets.
    costs : mapping of name to float
        The few figures that are kept from version to version; less is better in all of
        them, and a ratio to a floor or a peer says more than seconds.
    settings : mapping
        What was measured; JSON.
    results : object
        Everything that was measured; JSON.
    plot : callable, optional
        Draws into an empty figure.
    """

    name: str
    title: str
    tables: Sequence[Table]
    checks: Sequence[Check]
    costs: Mapping[str, float]
    settings: Mapping[str, object]
    results: object
    plot: Callable[[Figure], None] | None = field(default=None, repr=False)


def at_least(what: str, value: float, bound: float, note: str = "") -> Check:
    """Check a ratio that should be large."""
    return Check(what, f"{short(value)}x", f">= {bound:,g}x", value >= bound, note)


def at_most(what: str, value: float, bound: float, unit: str, note: str = "") -> Check:
    """Check a figure that should be small; the unit is what it is a multiple of."""
    return Check(what, short(value), f"<= {bound:,g} {unit}", value <= bound, note)


def short(value: float) -> str:
    """Write a number with the digits that matter, in six characters."""
    if value >= 99_999.5:
        digits, _, power = f"{value:.1e}".partition("e")
        return f"{digits.removesuffix('.0')}e{int(power)}"
    return f"{value:.2f}" if value < 10 and value % 1 else f"{value:,.0f}"


def show_table(console: Console, table: Table) -> None:
    """Print a table and its caption."""
    printed = _printed(table.title)
    for i, head in enumerate(table.heads):
        justify: JustifyMethod = "right" if i else "left"
        printed.add_column(head, justify=justify, no_wrap=i > 0)
    for row in table.rows:
        printed.add_row(*row)
    console.print(printed)
    if table.caption:
        console.print(table.caption, highlight=False)


def show(console: Console, outcome: Outcome) -> None:
    """Print the tables and the targets."""
    for table in outcome.tables:
        show_table(console, table)
    if not outcome.checks:
        return
    printed = _printed("Targets")
    for head in ("target", "measured", "bound", ""):
        printed.add_column(head, justify="right" if head == "measured" else "left")
    printed.add_column("note")
    for check in outcome.checks:
        verdict = "[green]holds" if check.holds else "[bold red]does not hold"
        printed.add_row(check.what, check.measured, check.bound, verdict, check.note)
    console.print(printed)


def _printed(title: str) -> RichTable:
    """Return a table that leaves the width of a terminal to its figures."""
    return RichTable(
        title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False
    )


def write(directory: Path, outcome: Outcome) -> None:
    """Write JSON with the machine that the figures come from, and a PNG."""
    directory.mkdir(parents=True, exist_ok=True)
    figures = {
        "name": outcome.name,
        "title": outcome.title,
        "machine": machine(),
        "tables": [asdict(table) for table in outcome.tables],
        "checks": [asdict(check) for check in outcome.checks],
        "costs": outcome.costs,
        "settings": outcome.settings,
        "results": outcome.results,
    }
    path = directory / f"{outcome.name}.json"
    path.write_text(json.dumps(figures, indent=2) + "\n")
    if outcome.plot is not None:
        with style.context(STYLE):
            figure = Figure(layout="constrained")
            outcome.plot(figure)
            figure.savefig(path.with_suffix(".png"), dpi=120)


@print_settings_errors
def main(
    run: Callable[[bool], Outcome],
    words: str | None,
    arguments: Sequence[str] | None = None,
) -> int:
    """Be the command of a benchmark: measure, print, write.

    Parameters
    ----------
    run : callable (quick) -> Outcome
    words : str or None
        Docstring of the module.
    arguments : sequence of str, optional
        By default the command's.
    """
    parser = Parser(description=(words or "").partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, to see that it runs"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="directory")
    options = parser.parse_args(arguments)
    prepare_folder(options.out)
    outcome = run(options.quick)
    console = Console()
    show(console, outcome)
    write(options.out, outcome)
    console.print(f"Written: {options.out / outcome.name}.json", highlight=False)
    return 0
