"""Hospitals train a tumour classifier, and some are hijacked: ``make demo``.

Seven hospitals hold tumours that they may show to nobody, two of them are in hostile
hands, and the server that joins what they learn is curious. The same training runs four
times over: the honest hospitals among themselves; all seven, averaged; with SMEA; with
Filter. No network, no data on disk: the tumours are scikit-learn's ``breast_cancer``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from simulations.command import complaining
from simulations.results.record import RunRecord
from simulations.results.report import epsilons, sweep_page
from simulations.results.summary import final
from simulations.results.sweep import conduct, sweep_parser

SEEDS = (1, 2, 3, 4, 5)
TITLE = "Hospitals train a tumour classifier, and some are hijacked"
ATTACKED = ["experiment=hospitals", "attack=foe"]
# What runs, by the words of the table.
SETTINGS = {
    "no attack": ["experiment=hospitals-unharmed"],
    "plain averaging, attacked": [*ATTACKED, "aggregation=average"],
    "SMEA, attacked": [*ATTACKED, "aggregation=smea"],
    "Filter, attacked": [*ATTACKED, "aggregation=filter"],
}
# A model that has learnt nothing says "benign" to all.
CHANCE = 0.63


@dataclass(frozen=True)
class Case:
    """One training."""

    setting: str
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's file, without suffix."""
        words = self.setting.replace(",", "").replace(" ", "-").lower()
        return f"{words}_seed{self.seed}"

    @property
    def overrides(self) -> list[str]:
        """What makes the run of the packaged configuration."""
        return [*SETTINGS[self.setting], f"seed={self.seed}"]


def by_setting(runs: Mapping[Case, RunRecord]) -> dict[str, list[RunRecord]]:
    """Return the runs of each row of the table."""
    return {
        setting: [run for case, run in runs.items() if case.setting == setting]
        for setting in SETTINGS
    }


def story(run: RunRecord) -> str:
    """Say what happens in an attacked run, with its figures."""
    config, plan = run["config"], run["config"]["privacy"]["plan"]  # type: ignore[index]
    n, f = config["num_nodes"], config["num_malicious_nodes"]
    m, tested = run["privacy"]["num_examples"], run["data"]["test_examples"]
    return (
        f"{n} hospitals train a classifier of tumours, malignant or benign. Each "
        f"honest one holds {m} tumours; {tested} others test. The server is curious, "
        "so every hospital clips the gradient of each tumour, adds Gaussian noise "
        f"({plan['noise_multiplier']:g} times what one other tumour in its place could "
        f"change) and sends only its momentum. {f} hospitals are hijacked: in every "
        "step they see what the honest ones send, and send the opposite of its mean "
        "(FOE), in the strength that harms the server's rule the most."
    )


def show(console: Console, groups: Mapping[str, Sequence[RunRecord]]) -> None:
    """Print the table and what it says."""
    runs = [run for some in groups.values() for run in some]
    seeds = len({run["seed"] for run in runs})
    table = Table(title=TITLE, box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for head in ("test accuracy", "worst seed", "epsilon"):
        table.add_column(head, justify="right")
    for setting, some in groups.items():
        figure = final(some)
        worst = min(run["evaluations"]["accuracy"][-1] for run in some)
        colour = "green" if worst > CHANCE else "bold red"
        table.add_row(setting, f"[{colour}]{figure}[/]", f"{worst:.3f}", epsilons(some))
    console.print(table)
    said = runs[0]["privacy"]
    console.print(
        f"Mean ± standard deviation over {seeds} seeds; to call every tumour benign "
        f"gives about {CHANCE:.2f}. Epsilon, at delta = {said['delta']:g} after "
        f"{said['steps']} steps, is what each honest hospital spends on its own "
        f"{said['num_examples']} tumours against everyone else, the server included: "
        f"{said['sampler']}, {said['adjacency']} adjacency, {said['accountant']}. "
        f"{said['note']}",
        highlight=False,
    )


@complaining
def main(argv: Sequence[str] | None = None) -> int:
    """Train, print a table, write a report."""
    words = __doc__.splitlines()[0]
    args = sweep_parser(words, "outputs/demo", SEEDS, page=False).parse_args(argv)
    cases = (Case(setting, seed) for seed in args.seeds for setting in SETTINGS)
    # All of them, also those that are there: who asks for a demo wants to see it.
    return conduct(args, cases, partial(conclude, args.output), again=True)


def conclude(folder: Path, console: Console, runs: Mapping[Case, RunRecord]) -> None:
    """Print the story and the table, and write the report."""
    groups = by_setting(runs)
    text = story(groups["SMEA, attacked"][0])
    console.print(text, highlight=False)
    show(console, groups)
    page = folder / "report.html"
    panels = {"With and without an attack": groups}
    page.write_text(sweep_page(TITLE, panels, lead=text))
    console.print(f"Report, with plots: {page}")


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        sys.exit(130)  # as shells say of a command that Ctrl-C stopped
