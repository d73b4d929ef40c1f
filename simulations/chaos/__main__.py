"""Break a federation while it trains: ``python -m simulations.chaos``.

A real SuperLink and five SuperNodes with TLS and registered keys. Exits with 1 if
anything does not hold that must hold after a fault.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flwr_safedshb.atomic_io import replace_file
from simulations.chaos import problem
from simulations.chaos.faults import FAULTS
from simulations.chaos.suite import FaultReport, clear_folder, run_trials
from simulations.chaos.tolerance import Tolerance, measure_tolerance
from simulations.command import Parser, at_least, prepare_folder, print_settings_errors
from simulations.config import SettingsError
from simulations.loopback import ROOT

STEPS = 6


@print_settings_errors
def main(arguments: list[str] | None = None) -> int:
    """Run the suite; return the exit code."""
    parser = Parser(prog="chaos", description=__doc__)
    keys = [fault.key for fault in FAULTS]
    parser.add_argument("--only", nargs="+", choices=keys, default=keys, metavar="KEY")
    parser.add_argument("--seed", type=at_least(0), default=1)
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "chaos")
    parser.epilog = f"Keys: {', '.join(keys)}."
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    prepare_folder(options.output)
    known = {"federation", "report.json"}
    if others := {path.name for path in options.output.iterdir()} - known:
        raise SettingsError(
            f"--output {options.output} is emptied before a run, and {min(others)} in "
            "it is of no run; name another folder"
        )
    clear_folder(options.output)
    console = Console(log_path=False)
    faults = [fault for fault in FAULTS if fault.key in options.only]
    with console.status("") as status:

        def say(text: str) -> None:
            status.update(text)
            console.log(text)

        say("models without a fault, in this process")
        tolerance = measure_tolerance(options.seed, STEPS)
        folder = options.output / "federation"
        findings = run_trials(folder, faults, options.seed, STEPS, tolerance, say)
    report = {
        "config": {
            "faults": [fault.key for fault in faults],
            "seed": options.seed,
            "steps": STEPS,
            "nodes": problem.NODES,
            "num_malicious_nodes": 1,
            "momentum": problem.BETA,
            "plan": json.loads(problem.PLAN.to_json()),
            "delta": problem.DELTA,
        },
        "without_fault": {**asdict(tolerance), "limit": tolerance.limit},
        "findings": [asdict(finding) for finding in findings],
    }
    path = options.output / "report.json"
    text = json.dumps(report, indent=2).encode()
    replace_file(path, lambda file: file.write(text))
    console.print(make_table(findings, tolerance))
    wrong = [f"{f.name}: {text}" for f in findings for text in f.problems]
    for problem_ in wrong:
        console.print(problem_, style="red", highlight=False, markup=False)
    console.print(f"{path}, after {time.monotonic() - begin:.0f} s")
    return 1 if wrong else 0


def make_table(findings: list[FaultReport], tolerance: Tolerance) -> Table:
    """Return the report for people."""
    caption = f"distance from the optimum: {tolerance} without a fault, at most "
    table = Table(caption=f"{caption}{tolerance.limit:.3f}; 2.000 untrained")
    for heading in ("Fault", "The log says", "Lost ε", "Effect", "Distance", ""):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row(
            finding.name,
            escape(finding.seen),
            f"{finding.lost_epsilon:.2f}",
            finding.effect,
            f"{finding.distance:.3f}",
            "[red]fails[/]" if finding.problems else "[green]holds[/]",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
