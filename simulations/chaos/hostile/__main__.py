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
from rich.markdown import Markdown
from rich.text import Text

from flwr_safedshb.atomic_io import replace_file
from simulations.chaos.hostile.attacks import ATTACKS
from simulations.chaos.hostile.report import make_markdown
from simulations.chaos.hostile.stranger import KINDS
from simulations.chaos.hostile.suite import attack_federation
from simulations.chaos.suite import clear_folder
from simulations.chaos.tolerance import quiet_flower
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
    clear_folder(options.output)
    tried = [name for name in ATTACKS if name != "be-silent"]
    with quiet_flower():
        report = attack_federation(
            options.output / "run",
            options.seed,
            list(itertools.islice(itertools.cycle(tried), options.rounds)),
            options.quiet,
            list(KINDS),
            options.seconds,
            console.log,
        )
    table = make_markdown(report.rows)
    text = json.dumps({"seed": options.seed, **asdict(report)}, indent=2)
    for name, content in (("report.json", text), ("table.md", table)):
        data = content.encode()
        replace_file(options.output / name, lambda file, data=data: file.write(data))  # type: ignore[misc]
    console.print(Markdown(table))
    console.print(f"model: {report.difference:g} off that of a run with a silent node")
    problems = report.wrong + report.slow
    for problem in problems:
        console.print(Text(problem), style="red")
    path = options.output / "report.json"
    console.print(f"{path}, after {time.monotonic() - begin:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
