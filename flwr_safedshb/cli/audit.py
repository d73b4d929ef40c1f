"""Attack clipping, ledger and node, as a hostile server or hostile data could.

Over a zoo of models it searches weights, inputs and batches for the largest change of a
clipped sum by one example, tries to read labels out of releases, sends a node every odd
message, plan and example, and compares the times of steps with bad examples and without
them. Nothing of this machine's nodes is used or charged. What
is done is kept in a file after every model, and a run that was stopped goes on there.

  safedshb audit --candidates 100               a first look
  safedshb audit --only CNN --only BERT
  safedshb audit --candidates 10000 --json
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flwr_safedshb.audit.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="models whose name has this in it, and nothing else",
    )
    parser.add_argument(
        "--candidates", type=int, default=1000, help="for each model (default: 1000)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("outputs/hostile.json"),
        help="where results are kept (default: outputs/hostile.json)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Attack everything; 0 if all promises hold."""
    from flwr_safedshb.audit.report import Report, Settings

    settings = Settings(candidates=arguments.candidates, seed=arguments.seed)
    report = Report.resumed(arguments.output, settings)
    attack(report, arguments.only, arguments.output)
    if arguments.json:
        print(json.dumps(json.loads(arguments.output.read_text()), indent=2))
    else:
        _show(report)
    return 0 if report.holds else 1


def attack(report: Report, only: list[str], output: Path) -> None:
    """Fill in what is missing in a report, and save it after every part."""
    from rich.console import Console
    from rich.progress import Progress

    from flwr_safedshb.audit.suite import attack_node, attempts
    from flwr_safedshb.audit.timing import MODELS, measure_times

    todo, report.left_out = attempts(only)
    todo = [attempt for attempt in todo if report.found(*attempt.names) is None]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        models = progress.add_task("models", total=len(todo))
        for attempt in todo:
            count = report.settings.candidates
            task = progress.add_task(", ".join(attempt.names), total=count)
            tell = functools.partial(progress.advance, task)
            row = attempt.run(report.settings, tell)
            report.models.append(row)
            report.save(output)
            progress.remove_task(task)
            progress.advance(models)
        if not only and not report.requests:
            task = progress.add_task("requests", total=None)
            report.requests += attack_node(report.settings)
            progress.remove_task(task)
        if not only and not report.times:
            task = progress.add_task("times of steps", total=len(MODELS))
            tell = functools.partial(progress.advance, task)
            report.times += measure_times(report.settings.steps, progress=tell)
            progress.remove_task(task)
    report.save(output)


def _show(report: Report) -> None:
    from flwr_safedshb.audit.report import HEADS, TIME_HEADS, time_cells
    from flwr_safedshb.cli._listing import print_table

    models = [row.cells() for row in report.models]
    print_table("One example's most, by search", HEADS, models, HEADS[2])
    if report.requests:
        requests = [row.cells() for row in report.requests]
        print_table(
            "Odd requests", ("asked for", "number", "outcomes"), requests, "number"
        )
    if report.times:
        times = [time_cells(row) for row in report.times]
        print_table(
            "Times of steps, in units of the usual", TIME_HEADS, times, "usual ms"
        )
    for line in report.left_out:
        print(f"left out: {line}")
    print("all promises hold" if report.holds else "BROKEN promises: see above")
