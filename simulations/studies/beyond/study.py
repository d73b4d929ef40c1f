"""Beyond the paper: other rules and tasks.

``python -m simulations.studies.beyond.study``.

The rules that everybody knows on the same momentums; workers that differ; fifty of
them; and a task that is not convex. Resumable, as the reproduction is.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from simulations.command import Parser, alone_at, complaining
from simulations.results import plots
from simulations.results.plots import Curve
from simulations.results.publish import check_page, publish
from simulations.results.record import RunRecord
from simulations.results.report import epsilons, sweep_page
from simulations.results.sweep import Sweep, add_arguments, complete
from simulations.studies.beyond.parts import (
    MISSING_DATA,
    PARTS,
    UNHARMED,
    Case,
    cases,
    fashion_mnist,
)
from simulations.studies.paper.summary import (
    ATTACK_WORDS,
    QUANTITIES,
    curve,
    final,
    losses,
    row,
)

SEEDS = (1, 2)
TITLE = "Safe-DSHB beyond the paper"
METHOD_WORDS = {
    UNHARMED: "no attack, averaged",
    "average": "FedAvg",
    "krum": "Krum",
    "multi-krum": "MultiKrum",
    "trimmed-mean": "TrimmedMean",
    "median": "Median",
    "geometric-median": "GeometricMedian",
    "smea": "SMEA",
    "filter": "Filter",
}
Runs = Mapping[Case, RunRecord]
Panel = dict[str, list[RunRecord]]


def panels(runs: Runs, name: str) -> dict[tuple[str, str], Panel]:
    """Return the runs of a part, by setting and attack, then by method."""
    part = PARTS[name]
    found: dict[tuple[str, str], Panel] = {}
    for setting in part.settings:
        for attack in part.attacks:
            content: Panel = {}
            for method in (UNHARMED, *part.rules):
                where = (name, setting, method, None if method == UNHARMED else attack)
                content[METHOD_WORDS[method]] = [
                    run
                    for case, run in runs.items()
                    if (case.part, case.setting, case.method, case.attack) == where
                ]
            found[setting, attack] = content
    return found


def words(setting: str, attack: str) -> str:
    """Return the title of a panel."""
    return ", ".join(part for part in (ATTACK_WORDS[attack], setting) if part)


def parts_of(runs: Runs) -> list[str]:
    """Return the parts there are runs of."""
    return [name for name in PARTS if any(case.part == name for case in runs)]


def draw(runs: Runs, folder: Path) -> None:
    """Write every panel, and those of a part together."""
    for name in parts_of(runs):
        for quantity in QUANTITIES:
            content: dict[str, dict[str, Curve]] = {}
            for (setting, attack), groups in panels(runs, name).items():
                lines = {k: curve(some, quantity) for k, some in groups.items()}
                content[words(setting, attack)] = lines
                stem = [name, setting.replace(" = ", ""), attack, quantity]
                figure = plots.panel(lines, quantity, words(setting, attack))
                plots.save(figure, folder / "_".join(part for part in stem if part))
            plots.save(plots.panels(content, quantity), folder / f"{name}_{quantity}")


def markdown(runs: Runs) -> str:
    """Return a table for each part."""
    lines = ["Final test accuracy, mean ± standard deviation over the seeds."]
    for name in parts_of(runs):
        part = PARTS[name]
        some = [run for case, run in runs.items() if case.part == name]
        seeds = sorted({run["seed"] for run in some})
        spent = sum(run["seconds"] for run in some)
        lines += ["", f"### {part.title}", "", part.question, ""]
        heads = ["attack", *(METHOD_WORDS[m] for m in (UNHARMED, *part.rules)), "ε"]
        lines += [row(heads), row(["---"] * len(heads))]
        for key, groups in panels(runs, name).items():
            every = [run for group in groups.values() for run in group]
            cells = [_cell(group) for group in groups.values()]
            lines.append(row([words(*key), *cells, epsilons(every)]))
        lines += ["", f"{len(some)} runs with seeds {seeds}, {spent:.0f} s in all."]
    said = next(iter(runs.values()))["privacy"]
    lines += [
        "",
        "↗ marks a training loss that ends higher than it began. ε is at delta = "
        f"{said['delta']:g}, {said['sampler']}, {said['adjacency']} adjacency, "
        f"{said['accountant']}; of the node with the fewest examples.",
        "",
        said["note"],
    ]
    return "\n".join([*lines, ""])


def _cell(runs: Sequence[RunRecord]) -> str:
    return f"{final(runs)}{'' if losses(runs).falls else ' ↗'}"


def write(runs: Runs, folder: Path) -> None:
    """Write tables, figures and the page."""
    draw(runs, folder / "figures")
    text = markdown(runs)
    (folder / "results.md").write_text(f"# {TITLE}\n\n{text}")
    figures = [
        {
            "part": name,
            "setting": setting,
            "attack": attack,
            "method": method,
            **vars(final(some)),
            "training_loss": vars(losses(some)),
        }
        for name in parts_of(runs)
        for (setting, attack), groups in panels(runs, name).items()
        for method, some in groups.items()
    ]
    (folder / "results.json").write_text(json.dumps(figures, indent=2) + "\n")
    content = {
        f"{PARTS[name].title}: {words(*key)}": groups
        for name in parts_of(runs)
        for key, groups in panels(runs, name).items()
    }
    (folder / "report.html").write_text(sweep_page(TITLE, content, text))


@complaining
def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, then draw and tabulate all of it."""
    parser = Parser(description=__doc__)
    add_arguments(parser, "outputs/beyond", SEEDS)
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=[*PARTS])
    parser.add_argument(
        "--page", type=Path, help="also put tables and figures into this page"
    )
    args = parser.parse_args(argv)
    console = Console()
    names = list(args.parts)
    if "network" in names and fashion_mnist() is None:
        console.print(MISSING_DATA, style="yellow", highlight=False)
        names.remove("network")
    if not names:
        return 0
    wanted = tuple(dict.fromkeys(cases(names, args.seeds)))
    work = Sweep(args.output, wanted, tuple(args.set))
    if args.page is not None:
        check_page(args.page, "beyond")
    work.check()
    with alone_at(args.output / "runs"):
        return conclude(console, work, args)


def conclude(console: Console, work: Sweep[Case], args: Namespace) -> int:
    """Run what is missing, draw and tabulate; return 1 if a run failed."""
    if not complete(console, work, args.workers):
        return 1
    runs = work.runs()
    write(runs, work.folder)
    console.print(Markdown(markdown(runs)))
    console.print(f"Figures, tables and runs are in {work.folder}")
    if args.page is not None:
        figures = {
            f"{PARTS[name].title}: {quantity.replace('_', ' ')}": work.folder
            / "figures"
            / f"{name}_{quantity}.png"
            for name in parts_of(runs)
            for quantity in QUANTITIES
        }
        publish(args.page, "beyond", markdown(runs), figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
