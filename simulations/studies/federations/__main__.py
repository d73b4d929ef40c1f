"""What a federation needs, measured: ``python -m simulations.studies.federations``.

Fewer rounds at the same epsilon; the mean of the last models; nodes that hold 50, 500
and 5,000 examples. Resumable, as the reproduction is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markdown import Markdown

from simulations.command import complaining
from simulations.data.files import MISSING_FASHION_MNIST, fashion_mnist
from simulations.results.publish import publish
from simulations.results.schema import RunRecord
from simulations.results.summary import Figure
from simulations.results.sweep import conduct, sweep_parser
from simulations.studies.federations.parts import (
    ATTACK_WORDS,
    PARTS,
    Case,
    cases,
)

SEEDS = (1, 2, 3, 4, 5)
Runs = Mapping[Case, RunRecord]


@complaining
def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, then tabulate all of it."""
    parser = sweep_parser(__doc__, "outputs/federations", SEEDS)
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=[*PARTS])
    args = parser.parse_args(argv)
    if fashion_mnist() is None and "local-steps" in args.parts:
        words = f"Rows of it are left out: {MISSING_FASHION_MNIST}."
        Console().print(words, style="yellow", highlight=False)
    finish = partial(conclude, args.page)
    return conduct(args, cases(args.parts, args.seeds), finish, "federations")


def conclude(page: Path | None, console: Console, runs: Runs) -> None:
    """Print the tables, and put them into a page."""
    text = markdown(runs)
    console.print(Markdown(text))
    if page is not None:
        publish(page, "federations", text)


def markdown(runs: Runs) -> str:
    """Return a table for each part that there are runs of."""
    names = [name for name in PARTS if any(case.part == name for case in runs)]
    head = "Test accuracy; where there are several seeds, mean ± standard deviation."
    return "\n\n".join([head, *(_section(name, runs) for name in names)])


def _section(name: str, runs: Runs) -> str:
    part = PARTS[name]
    mine = [case for case in runs if case.part == name]
    columns: dict[str, tuple[str, Callable[[RunRecord], float]]] = {}
    for column in part.columns:
        if name == "average":
            columns[f"{column}, last"] = column, _last
            columns[f"{column}, mean"] = column, _returned
        else:
            columns[column] = column, _returned
    seeds = len({case.seed for case in mine})
    over = "One seed." if seeds == 1 else f"{seeds} seeds."
    lines = [
        f"### {part.title}\n\n{part.question} {over}\n",
        f"| setting | epsilon | attack | {' | '.join(columns)} |",
        f"|---|---|---|{'---|' * len(columns)}",
    ]
    for row in part.rows:
        for attack in part.attacks:
            some = [case for case in mine if (case.row, case.attack) == (row, attack)]
            if some:
                cells = [
                    _figure([runs[c] for c in some if c.column == column], value)
                    for column, value in columns.values()
                ]
                spent = _epsilons([runs[case] for case in some])
                start = f"| {row} | {spent} | {ATTACK_WORDS[attack]} | "
                lines.append(f"{start}{' | '.join(cells)} |")
    return "\n".join(lines)


def _returned(run: RunRecord) -> float:
    return run["returned"]["accuracy"]


def _last(run: RunRecord) -> float:
    return run["evaluations"]["accuracy"][-1]


def _figure(runs: Sequence[RunRecord], value: Callable[[RunRecord], float]) -> str:
    values = np.array([value(run) for run in runs])
    if not len(values):
        return ""
    spread = float(values.std(ddof=min(1, len(values) - 1)))
    return str(Figure(float(values.mean()), spread, len(values)))


def _epsilons(runs: Sequence[RunRecord]) -> str:
    """Return the epsilon of the node that spends the most, in all of these runs."""
    spent = {run["privacy"]["epsilon"] for run in runs}
    return f"{max(each for each in spent if each is not None):.3g}"


if __name__ == "__main__":
    raise SystemExit(main())
