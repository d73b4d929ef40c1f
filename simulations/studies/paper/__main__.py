"""The paper's experiments again: ``python -m simulations.studies.paper``.

Allouah et al., ICML 2023: three privacy regimes, four attacks, Safe-DSHB with SMEA and
with Filter, and DP-DSGD without adversaries, five seeds: 135 runs. Beyond the paper 60
of Filter with the stop that users get by default, and 90 of all three rules under
attacks that search for the worst, mimic-shift and strongest. A run that is already
there, with the same configuration, is not run again, so a reproduction that was killed
goes on where it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from simulations.command import complaining
from simulations.results.publish import publish
from simulations.results.report import sweep_page
from simulations.results.schema import RunRecord
from simulations.results.summary import QUANTITIES
from simulations.results.sweep import conduct, sweep_parser
from simulations.studies.paper import summary, tables
from simulations.studies.paper.cases import REGIMES, SEEDS, Case, cases

TITLE = "Safe-DSHB: the paper's experiments, reproduced"


@complaining
def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, then draw and tabulate all of it."""
    parser = sweep_parser(__doc__, "outputs/reproduce", SEEDS)
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=REGIMES)
    parser.add_argument(
        "--quick", action="store_true", help="one seed and 20 steps, to see it work"
    )
    args = parser.parse_args(argv)
    if args.quick:
        if args.page:
            parser.error("--page shows whole runs: leave out --quick")
        args.seeds, args.set = args.seeds[:1], ["steps=20", *args.set]
    finish = partial(conclude, args.output, args.page)
    return conduct(args, cases(args.regimes, args.seeds), finish, "reproduce")


def conclude(
    folder: Path, page: Path | None, console: Console, runs: Mapping[Case, RunRecord]
) -> None:
    """Draw and tabulate all runs."""
    summary.draw(runs, folder / "figures")
    tables.write(runs, folder)
    text = tables.markdown(runs)
    panels = dict(summary.panels(runs).values())
    (folder / "report.html").write_text(sweep_page(TITLE, panels, text))
    console.print(Markdown(text))
    console.print(f"Figures, tables and runs are in {folder}")
    if page is not None:
        figures = {
            f"{quantity.replace('_', ' ')}, {regime} privacy": folder
            / "figures"
            / f"{regime}_{quantity}.png"
            for regime in summary.regimes(runs)
            for quantity in QUANTITIES
        }
        publish(page, "reproduce", tables.tables(runs), figures)


if __name__ == "__main__":
    raise SystemExit(main())
