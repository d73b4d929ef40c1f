"""Beyond the paper: ``python -m simulations.studies.beyond``.

The rules that everybody knows on the same momentums; every rule as adversaries grow in
number; clients that differ; fifty of them; and a task that is not convex. Resumable, as
the reproduction is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from simulations.command import complaining
from simulations.data.files import MISSING_FASHION_MNIST, fashion_mnist
from simulations.results.publish import publish
from simulations.results.schema import RunRecord
from simulations.results.summary import QUANTITIES
from simulations.results.sweep import conduct, sweep_parser
from simulations.studies.beyond.parts import PARTS, Case, cases
from simulations.studies.beyond.summary import markdown, parts_of, write

SEEDS = (1, 2)


@complaining
def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, then draw and tabulate all of it."""
    parser = sweep_parser(__doc__, "outputs/beyond", SEEDS)
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=[*PARTS])
    args = parser.parse_args(argv)
    names = list(args.parts)
    if "network" in names and fashion_mnist() is None:
        words = f"The part 'network' is left out: {MISSING_FASHION_MNIST}."
        Console().print(words, style="yellow", highlight=False)
        names.remove("network")
    if not names:
        return 0
    finish = partial(conclude, args.output, args.page)
    return conduct(args, cases(names, args.seeds), finish, "beyond")


def conclude(
    folder: Path, page: Path | None, console: Console, runs: Mapping[Case, RunRecord]
) -> None:
    """Draw and tabulate all runs."""
    write(runs, folder)
    console.print(Markdown(markdown(runs)))
    console.print(f"Figures, tables and runs are in {folder}")
    if page is not None:
        figures = {
            f"{PARTS[name].title}: {quantity.replace('_', ' ')}": folder
            / "figures"
            / f"{name}_{quantity}.png"
            for name in parts_of(runs)
            for quantity in QUANTITIES
        }
        publish(page, "beyond", markdown(runs), figures)


if __name__ == "__main__":
    raise SystemExit(main())
