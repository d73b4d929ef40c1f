"""Attack a federation as a node and as strangers: ``-m simulations.chaos.hostile``.

A real SuperLink, the gate and four SuperNodes, with TLS and registered keys; the fifth
node is a program that speaks for itself. Exits with 1 if anything does not hold that
must.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flwr_safedshb.atomic_io import replace_file
from simulations.chaos.band import quiet
from simulations.chaos.hostile.insider import ATTACKS
from simulations.chaos.hostile.rows import Report, markdown
from simulations.chaos.hostile.stranger import KINDS
from simulations.chaos.hostile.suite import attacked
from simulations.chaos.suite import cleared
from simulations.loopback import ROOT


def main(arguments: list[str] | None = None) -> int:
    """Run the suite; return the exit code."""
    parser = argparse.ArgumentParser(prog="hostile", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="with attacks")
    parser.add_argument("--quiet", type=int, default=6, help="rounds without, before")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each stranger")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "hostile")
    options = parser.parse_args(arguments)
    console = Console(log_path=False)
    begin = time.monotonic()
    cleared(options.output)
    tried = [name for name in ATTACKS if name != "be-silent"]
    attacks = list(itertools.islice(itertools.cycle(tried), options.rounds))
    with quiet():
        report = attacked(
            options.output / "run",
            options.seed,
            attacks,
            options.quiet,
            list(KINDS),
            options.seconds,
            console.log,
        )
    path = options.output / "report.json"
    text = json.dumps({"seed": options.seed, **asdict(report)}, indent=2).encode()
    replace_file(path, lambda file: file.write(text))
    page = markdown(report).encode()
    replace_file(options.output / "table.md", lambda file: file.write(page))
    console.print(table(report))
    console.print(f"model: {report.difference:g} off that of a run with a silent node")
    problems = report.wrong + report.slow
    for problem in problems:
        console.print(Text(problem), style="red")
    console.print(f"{path}, after {time.monotonic() - begin:.0f} s")
    return 1 if problems else 0


def table(report: Report) -> Table:
    """Return the report for people."""
    shown = Table()
    heads = ("Tried", "Answer", "Lost rounds", "Wasted steps")
    for heading in (*heads, "Slowest call (s), before", "Gate (MiB)"):
        shown.add_column(heading, overflow="fold")
    for row in report.rows:
        cells = (
            row.tried,
            row.seen,
            str(row.lost_rounds),
            str(row.wasted_steps),
            f"{row.slowest:.2f}, {row.slowest_before:.2f}",
            f"{row.memory:.0f}",
        )
        shown.add_row(*map(Text, cells))
    return shown


if __name__ == "__main__":
    sys.exit(main())
