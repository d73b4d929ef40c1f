"""The paper's experiments again: ``python -m simulations.studies.paper.reproduce``.

Allouah et al., ICML 2023: three privacy regimes, four attacks, Safe-DSHB with SMEA and
with Filter, and DP-DSGD without adversaries, five seeds: 135 runs. Sixty more run
Filter with the stop that users get by default. A run that is already there, with the
same configuration, is not run again, so a reproduction that was killed goes on where it
was.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from simulations.command import Parser, alone_at, complaining
from simulations.results.publish import check_page, publish
from simulations.results.sweep import Sweep, add_arguments, complete

REGIMES = ("low", "moderate", "high")
ATTACKS = ("alie", "foe", "sign-flip", "label-flip")
# The paper's two, then what it does not have.
PAPER_RULES = ("smea", "filter-literal")
OWN_RULES = ("filter",)
BENCHMARK = "dp-dsgd"
SEEDS = (1, 2, 3, 4, 5)
TITLE = "Safe-DSHB: the paper's experiments, reproduced"


@dataclass(frozen=True)
class Case:
    """One run of the reproduction; `attack` is None for DP-DSGD."""

    regime: str
    method: str
    attack: str | None
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's file, without suffix."""
        parts = (self.regime, self.method, self.attack, f"seed{self.seed}")
        return "_".join(part for part in parts if part)

    @property
    def overrides(self) -> list[str]:
        """What makes the run of the packaged configuration."""
        where = [f"privacy={self.regime}", f"seed={self.seed}"]
        if self.attack is None:
            return [f"experiment={BENCHMARK}", *where]
        attacked = [f"aggregation={self.method}", f"attack={self.attack}"]
        return ["experiment=paper", *attacked, *where]


def cases(
    regimes: Sequence[str] = REGIMES, seeds: Sequence[int] = SEEDS
) -> Iterator[Case]:
    """Yield all runs; the paper's come before those that it does not have."""
    for rules in (PAPER_RULES, OWN_RULES):
        for regime in regimes:
            for seed in seeds:
                if rules is PAPER_RULES:
                    yield Case(regime, BENCHMARK, None, seed)
                for attack in ATTACKS:
                    for rule in rules:
                        yield Case(regime, rule, attack, seed)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(description=__doc__)
    add_arguments(parser, "outputs/reproduce", SEEDS)
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=REGIMES)
    parser.add_argument(
        "--quick", action="store_true", help="one seed and 20 steps, to see it work"
    )
    parser.add_argument(
        "--page", type=Path, help="also put tables and figures into this page"
    )
    args = parser.parse_args(argv)
    if args.quick and args.page:
        parser.error("--page shows whole runs: leave out --quick")
    return args


@complaining
def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, then draw and tabulate all of it."""
    args = arguments(argv)
    console = Console()
    seeds = args.seeds[:1] if args.quick else args.seeds
    more = (*(["steps=20"] if args.quick else []), *args.set)
    wanted = tuple(dict.fromkeys(cases(args.regimes, seeds)))
    work = Sweep(args.output, wanted, more)
    if args.page is not None:
        check_page(args.page, "reproduce")
    work.check()
    with alone_at(args.output / "runs"):
        if not complete(console, work, args.workers):
            return 1
        conclude(console, work, args.page)
    return 0


def conclude(console: Console, work: Sweep[Case], page: Path | None) -> None:
    """Draw and tabulate all runs."""
    from simulations.results.report import sweep_page
    from simulations.studies.paper import statements, summary

    runs = work.runs()
    summary.draw(runs, work.folder / "figures")
    statements.write(runs, work.folder)
    text = statements.markdown(runs)
    panels = summary.by_panel(runs)
    (work.folder / "report.html").write_text(sweep_page(TITLE, panels, text))
    console.print(Markdown(text))
    console.print(f"Figures, tables and runs are in {work.folder}")
    if page is not None:
        figures = {
            f"{quantity.replace('_', ' ')}, {regime} privacy": work.folder
            / "figures"
            / f"{regime}_{quantity}.png"
            for regime in summary.regimes(runs)
            for quantity in summary.QUANTITIES
        }
        publish(page, "reproduce", statements.tables(runs), figures)


if __name__ == "__main__":
    raise SystemExit(main())
