"""Hospitals train a tumour classifier, and some are hijacked: ``make demo``.

Seven hospitals hold tumours that they may show to nobody, some many and some few; two
of them are in hostile hands, and the server that joins what they learn is curious. The
same training runs six times over: the honest hospitals among themselves; all seven,
averaged; with SMEA; with Filter; and with both under the strongest attack that we ship.
What a model is worth the hospitals say themselves, privately, and the hijacked ones
lie. No network, no data on disk: the tumours are scikit-learn's ``breast_cancer``.
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
from simulations.results.answers import last_answer
from simulations.results.report import epsilons, sweep_page
from simulations.results.schema import RunRecord
from simulations.results.summary import final
from simulations.results.sweep import conduct, sweep_parser

SEEDS = (1, 2, 3, 4, 5)
TITLE = "Hospitals train a tumour classifier, and some are hijacked"
ATTACKED = ["experiment=hospitals"]
# What runs, by the words of the table.
SETTINGS = {
    "no attack": ["experiment=hospitals-unharmed"],
    "plain averaging, FOE": [*ATTACKED, "aggregation=average"],
    "SMEA, FOE": [*ATTACKED, "aggregation=smea"],
    "Filter, FOE": [*ATTACKED, "aggregation=filter"],
    "SMEA, strongest": [*ATTACKED, "aggregation=smea", "attack=strongest"],
    "Filter, strongest": [*ATTACKED, "aggregation=filter", "attack=strongest"],
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
    config = run["config"]
    n, f = config["num_nodes"], config["num_malicious_nodes"]
    sizes = [node["num_examples"] for node in run["by_node"]]
    noise = [node["noise_multiplier"] for node in run["by_node"]]
    target = config["privacy"]["target_epsilon"]  # type: ignore[index]
    return (
        f"{n} hospitals train a classifier of tumours, malignant or benign. The honest "
        f"ones hold {', '.join(map(str, sizes))} tumours. The server is curious, so "
        "every hospital clips the gradient of each tumour, adds Gaussian noise and "
        "sends only its momentum: the noise that leaves each single tumour at epsilon "
        f"{target:g}, from {max(noise):.2g} to {min(noise):.2g} times what one other "
        "tumour in its place could change. A quarter of its tumours never train: with "
        "them it answers, with noise again, how good the model is. "
        f"{f} hospitals are hijacked: in every step they see what the honest ones "
        "send, and send the opposite of its mean (FOE), in the strength that harms the "
        "server's rule the most; or, with tumours of their own, they search for "
        "what harms the most in that step (strongest). And they answer that nothing "
        "is right."
    )


def show(console: Console, groups: Mapping[str, Sequence[RunRecord]]) -> None:
    """Print the table and what it says."""
    runs = [run for some in groups.values() for run in some]
    seeds = len({run["seed"] for run in runs})
    table = Table(title=TITLE, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for head in ("answer, 95 %", "accuracy*", "worst", "epsilon"):
        table.add_column(head, justify="right", no_wrap=True)
    for setting, some in groups.items():
        figure = final(some)
        worst = min(run["returned"]["accuracy"] for run in some)
        colour = "green" if worst > CHANCE else "bold red"
        said = last_answer(some) or "-"
        true = f"[{colour}]{figure}[/]"
        table.add_row(setting, said, true, f"{worst:.3f}", epsilons(some))
    console.print(table)
    spent = runs[0]["privacy"]
    console.print(
        "* on tumours that no hospital holds: not for hospitals, who have no public "
        f"test set. Mean ± standard deviation over {seeds} seeds; to call every tumour "
        f"benign gives about {CHANCE:.2f}. The answer is the median that hospitals "
        "report, each counting once, and where the honest hospitals' median lies "
        "whatever hijacked ones say; means over the seeds. Epsilon, at delta = "
        f"{spent['delta']:g} after {spent['steps']} steps and one answer, is what each "
        "honest hospital spends on each single tumour of its own against everyone "
        "else, the server included: "
        f"{spent['sampler']}, {spent['adjacency']} adjacency, {spent['accountant']}. "
        f"{spent['note']}",
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
    text = story(groups["SMEA, FOE"][0])
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
