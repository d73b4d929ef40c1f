"""In search of a better rule: ``python -m simulations.studies.better``.

SMEA on the paper's task beside what might keep more of a training: the min-max point,
the mean of all models, screening of what nodes claim, and other ways to spend the same
epsilon. Each is attacked by colluders who know it. Resumable.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from simulations.command import complaining
from simulations.results.publish import publish
from simulations.results.sweep import conduct, sweep_parser
from simulations.studies.better import reach
from simulations.studies.better.cases import cases, settings
from simulations.studies.better.summary import Runs, markdown

SEEDS = (1,)


@complaining
def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, then tabulate all of it."""
    parser = sweep_parser(__doc__, "outputs/better", SEEDS)
    sizes = sorted({it.n for it in settings()})
    parser.add_argument(
        "--nodes", nargs="+", type=int, choices=sizes, default=sizes, help="all"
    )
    args = parser.parse_args(argv)
    chosen = [setting for setting in settings() if setting.n in args.nodes]
    finish = partial(conclude, args.output, args.page)
    return conduct(args, cases(chosen, args.seeds), finish, "better")


def conclude(folder: Path, page: Path | None, console: Console, runs: Runs) -> None:
    """Print and write the tables."""
    text = f"{reach.markdown()}\n{markdown(runs)}"
    (folder / "results.md").write_text(text)
    console.print(Markdown(text))
    console.print(f"Tables and runs are in {folder}")
    if page is not None:
        publish(page, "better", text)


if __name__ == "__main__":
    raise SystemExit(main())
