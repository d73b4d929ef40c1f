"""Break a federation while it trains: ``python -m simulations.chaos``.

A real SuperLink and five SuperNodes with TLS and registered keys. Exits with 1 if
anything does not hold that must hold after a fault.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flwr_safedshb.atomic_io import replace_file
from simulations.chaos import band, problem
from simulations.chaos.faults import FAULTS, Fault
from simulations.chaos.findings import Finding
from simulations.chaos.suite import cleared, trained
from simulations.command import Parser, at_least, prepare_folder, print_settings_errors
from simulations.config import SettingsError
from simulations.loopback import ROOT

STEPS = 6


@print_settings_errors
def main(arguments: list[str] | None = None) -> int:
    """Run the suite; return the exit code."""
    options = _options(arguments)
    console = Console(log_path=False)
    begin = time.monotonic()
    prepare_folder(options.output)
    known = {"federation", "report.json"}
    if others := {path.name for path in options.output.iterdir()} - known:
        raise SettingsError(
            f"--output {options.output} is emptied before a run, and {min(others)} in "
            "it is of no run; name another folder"
        )
    cleared(options.output)
    faults = [fault for fault in FAULTS if fault.key in options.only]
    with console.status("") as status:

        def say(text: str) -> None:
            status.update(text)
            console.log(text)

        say("models without a fault, in this process")
        normal = band.measured(options.seed, STEPS)
        folder = options.output / "federation"
        findings = trained(folder, faults, options.seed, STEPS, normal, say)
    path = options.output / "report.json"
    _write(path, options.seed, faults, findings, normal)
    console.print(table(findings, normal))
    wrong = [f"{f.name}: {text}" for f in findings for text in f.problems]
    for text in wrong:
        console.print(text, style="red", highlight=False, markup=False)
    console.print(f"{path}, after {time.monotonic() - begin:.0f} s")
    return 1 if wrong else 0


def table(findings: list[Finding], normal: band.Band) -> Table:
    """Return the report for people."""
    caption = f"distance from the optimum: {normal} without a fault, at most "
    shown = Table(caption=f"{caption}{normal.limit:.3f}; 2.000 untrained")
    for heading in ("Fault", "The log says", "Lost ε", "Effect", "Distance", ""):
        shown.add_column(heading, overflow="fold")
    for finding in findings:
        shown.add_row(
            finding.name,
            escape(finding.seen),
            f"{finding.lost_epsilon:.2f}",
            finding.effect,
            f"{finding.distance:.3f}",
            "[red]fails[/]" if finding.problems else "[green]holds[/]",
        )
    return shown


def _write(
    path: Path,
    seed: int,
    faults: list[Fault],
    findings: list[Finding],
    normal: band.Band,
) -> None:
    content = {
        "config": {
            "faults": [fault.key for fault in faults],
            "seed": seed,
            "steps": STEPS,
            "nodes": problem.NODES,
            "num_malicious_nodes": 1,
            "momentum": problem.BETA,
            "plan": json.loads(problem.PLAN.to_json()),
            "delta": problem.DELTA,
        },
        "without_fault": {**asdict(normal), "limit": normal.limit},
        "findings": [asdict(finding) for finding in findings],
    }
    text = json.dumps(content, indent=2).encode()
    replace_file(path, lambda file: file.write(text))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="chaos", description=__doc__)
    keys = [fault.key for fault in FAULTS]
    parser.add_argument("--only", nargs="+", choices=keys, default=keys, metavar="KEY")
    parser.add_argument("--seed", type=at_least(0), default=1)
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "chaos")
    parser.epilog = f"Keys: {', '.join(keys)}."
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
