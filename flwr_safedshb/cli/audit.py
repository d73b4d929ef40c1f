"""Attack clipping, ledger and node, as a hostile server or hostile data could.

Four suites, each a question:
  sensitivity  can one example move a clipped sum by more than the bound? Over a zoo of
               models it searches weights, inputs and batches, and tries to read labels
  messages     can an odd message, plan, example or order of charges change what leaves?
  timing       does the time of a step depend on its examples? For people to judge
  epsilon      can neighbouring datasets be told apart better than epsilon allows?

It uses made-up data, and no ledger of this machine. The report is saved after every
task, as JSON with a CSV of its rows beside it; a run that was stopped goes on there.

  safedshb audit --candidates 100               a first look
  safedshb audit --only CNN --only BERT
  safedshb audit --suite epsilon --trials 2000
  safedshb audit --candidates 10000 --json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--suite",
        action="append",
        default=[],
        metavar="NAME",
        help="run this suite alone; may be repeated (default: all)",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="search models whose name has this in it, and nothing else",
    )
    parser.add_argument(
        "--candidates", type=int, default=1000, help="for each model (default: 1000)"
    )
    parser.add_argument(
        "--trials",
        type=int,
        default=10_000,
        help="releases on each of two neighbouring datasets (default: 10000)",
    )
    parser.add_argument(
        "--delta", type=float, default=0.05, help="of the measured epsilon (0.05)"
    )
    parser.add_argument(
        "--confidence", type=float, default=0.999, help="of that bound (default: 0.999)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--secure",
        action="store_true",
        help="measure epsilon with a deployment's randomness, which has no seed",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("outputs/audit.json"),
        help="where results are kept (default: outputs/audit.json)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Attack everything; 0 if all promises hold."""
    from flwr_safedshb.audit.suites import SUITES, Settings, run_audit
    from flwr_safedshb.cli._listing import print_table

    settings = Settings(
        candidates=arguments.candidates,
        trials=arguments.trials,
        delta=arguments.delta,
        confidence=arguments.confidence,
        secure=arguments.secure,
        seed=arguments.seed,
    )
    report = run_audit(settings, arguments.output, arguments.suite, arguments.only)
    if arguments.json:
        print(json.dumps(json.loads(arguments.output.read_text()), indent=2))
        return 0 if report.holds else 1
    for name, suite in SUITES.items():
        rows = [suite.format_row(row) for row in report.rows if row.suite == name]
        if rows:
            print_table(suite.title, suite.headings, rows, suite.unit)
    print("all promises hold" if report.holds else "BROKEN promises: see above")
    return 0 if report.holds else 1
