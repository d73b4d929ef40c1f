"""Read a privacy ledger: what was spent, on which runs, and what is left.

The ledger is named by its file, by its state-dir, or by the node's TOML file. It is
read from a copy made at one moment, also while a node is charging it, and neither
created nor changed.

  safedshb ledger show node.toml
  safedshb ledger show /var/lib/safedshb/state --json
  safedshb ledger show node.toml --follow   again after every charge, until Ctrl-C
  safedshb ledger export node.toml --format json --output charges.json
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flwr_safedshb.sanitize import escape_cell, escape_lines

if TYPE_CHECKING:
    from flwr_safedshb.privacy.ledger.ledger import Charge, Ledger
    from flwr_safedshb.privacy.plan import PrivacyPlan, PrivacyStatement, PrivacyUnit


_FOLLOW_SECONDS = 1.0


@dataclass(frozen=True)
class RunCharges:
    """What one run was charged; `epsilon_alone` of several runs do not add up."""

    run: str
    first: str
    last: str
    steps: int
    epsilon_alone: float
    plans: list[PrivacyPlan]


@dataclass(frozen=True)
class CommittedSteps:
    """Steps of a plan that a run was committed to, and how many all runs have used."""

    run: str
    plan: PrivacyPlan
    steps: int
    used: int


@dataclass(frozen=True)
class StepsLeft:
    """How many more steps of a plan the budget allows."""

    plan: PrivacyPlan
    steps: int


@dataclass(frozen=True)
class LedgerSummary:
    """What a ledger says; its first commitment comes first."""

    max_epsilon: float
    delta: float
    unit: PrivacyUnit
    spent: PrivacyStatement
    committed: list[CommittedSteps]
    left: list[StepsLeft]
    runs: list[RunCharges]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    actions = parser.add_subparsers(dest="action", metavar="show|export", required=True)
    show = actions.add_parser("show", help="a summary, by run")
    how = show.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print JSON")
    how.add_argument(
        "--follow", action="store_true", help="show it again whenever it is charged"
    )
    export = actions.add_parser("export", help="every charge")
    export.add_argument("--format", choices=("csv", "json"), default="csv")
    export.add_argument(
        "--output", type=Path, help="a new file (default: print the charges)"
    )
    for action in (show, export):
        action.add_argument("ledger", type=Path, help="file, state-dir or node's TOML")


def run(arguments: argparse.Namespace) -> int:
    """Print the ledger; 1 if it cannot be trusted."""
    from flwr_safedshb.privacy.ledger.database import LedgerError
    from flwr_safedshb.privacy.ledger.snapshot import open_snapshot

    path = _find_ledger(arguments.ledger)
    try:
        if arguments.action == "show" and arguments.follow:
            _follow_ledger(path)
            return 0
        with open_snapshot(path) as ledger:
            if arguments.action == "export":
                _export_charges(ledger.charges(), arguments.format, arguments.output)
            elif arguments.json:
                found = {"ledger": str(path), **asdict(_summarize(ledger))}
                print(json.dumps(found, indent=2))
            else:
                _print_summary(path, _summarize(ledger))
    except LedgerError as error:
        print(escape_lines(f"safedshb ledger: {error}"), file=sys.stderr)
        return 1
    return 0


def _follow_ledger(path: Path) -> None:
    """Print the ledger, and again whenever it has changed, until Ctrl-C."""
    from flwr_safedshb.privacy.ledger.snapshot import open_snapshot

    seen: tuple[int, int] | None = None
    with suppress(KeyboardInterrupt):
        while True:
            # By name only: to open the ledger would get in the way of a charge.
            stat = path.stat() if path.exists() else None
            now = None if stat is None else (stat.st_mtime_ns, stat.st_ino)
            if now is None or now != seen:
                with open_snapshot(path) as ledger:
                    _print_summary(path, _summarize(ledger))
                sys.stdout.flush()
                seen = now
            time.sleep(_FOLLOW_SECONDS)


def _find_ledger(path: Path) -> Path:
    from flwr_safedshb.algorithm.budget import LEDGER_NAME

    if path.suffix == ".toml":
        from flwr_safedshb.node.node_file import read_node_file

        config = read_node_file(path).config
        if "state-dir" not in config:
            raise ValueError(f"{path} has no state-dir, and so no ledger")
        path = Path(str(config["state-dir"]))
        return path / LEDGER_NAME
    return path / LEDGER_NAME if path.is_dir() else path


def _summarize(ledger: Ledger) -> LedgerSummary:
    by_run: dict[str, list[Charge]] = {}
    used: Counter[PrivacyPlan] = Counter()
    for charge in ledger.charges():
        by_run.setdefault(charge.run, []).append(charge)
        used[charge.plan.convert_to_unit(ledger.unit)] += charge.steps
    runs = [
        RunCharges(
            run,
            mine[0].time,
            mine[-1].time,
            sum(charge.steps for charge in mine),
            ledger.epsilon(run),
            list(dict.fromkeys(charge.plan for charge in mine)),
        )
        for run, mine in by_run.items()
    ]
    committed = [
        CommittedSteps(
            one.run, one.plan, one.steps, used[one.plan.convert_to_unit(ledger.unit)]
        )
        for one in ledger.commitments()
    ]
    plans = [one.plan for one in (*ledger.charges(), *ledger.commitments())]
    left = [StepsLeft(plan, ledger.steps_left(plan)) for plan in dict.fromkeys(plans)]
    return LedgerSummary(
        ledger.max_epsilon,
        ledger.delta,
        ledger.unit,
        ledger.statement(),
        committed,
        left,
        runs,
    )


def _print_summary(path: Path, summary: LedgerSummary) -> None:
    from flwr_safedshb.cli._listing import print_table
    from flwr_safedshb.privacy.plan import describe_unit, split_unit

    rows = [
        (
            run.run,
            f"{run.first[:16]} to {run.last[:16]}",
            str(run.steps),
            f"{run.epsilon_alone:.4g}",
            "; ".join(map(_describe_plan, run.plans)),
        )
        for run in summary.runs
    ]
    heads = ("run", "charged (UTC)", "steps", "epsilon alone", "plan")
    print_table(f"Ledger {path}", heads, rows, number="steps")
    print(f"spent:   {summary.spent}")
    print(
        f"allowed: epsilon = {summary.max_epsilon:g} at delta = {summary.delta:g} "
        f"for {describe_unit(split_unit(summary.unit)[0])} ({summary.unit})"
    )
    for one in summary.committed:
        print(
            f"committed by run {one.run}: {one.steps} steps of "
            f"{_describe_plan(one.plan)}, {one.used} used by all runs"
        )
    for left in summary.left:
        print(f"left:    {left.steps} steps of {_describe_plan(left.plan)}")


def _describe_plan(plan: PrivacyPlan) -> str:
    return (
        f"C {plan.clip_norm:g}, noise multiplier {plan.noise_multiplier:g}, "
        f"{plan.batch_size} of {plan.num_examples} {plan.unit}s ({plan.sampling}, "
        f"{plan.adjacency})"
    )


def _export_charges(charges: list[Charge], form: str, output: Path | None) -> None:
    rows = [
        {"time": c.time, "run": c.run, "steps": c.steps, **asdict(c.plan)}
        for c in charges
    ]
    if form == "json":
        text = json.dumps(rows, indent=2) + "\n"
    else:
        from flwr_safedshb.privacy.plan import PrivacyPlan

        names = ["time", "run", "steps", *PrivacyPlan.__dataclass_fields__]
        with io.StringIO() as buffer:
            writer = csv.DictWriter(buffer, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(
                {k: escape_cell(v) if isinstance(v, str) else v for k, v in row.items()}
                for row in rows
            )
            text = buffer.getvalue()
    if output is None:
        print(text, end="")
        return
    try:
        # Nobody else's to read, whatever the umask.
        handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ValueError(f"--output={output} exists and is not overwritten") from None
