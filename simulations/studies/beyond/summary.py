"""The runs beyond the paper by part and panel: tables, figures, the page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from simulations.results import summary
from simulations.results.report import epsilons, sweep_page
from simulations.results.schema import RunRecord
from simulations.results.summary import ATTACK_WORDS, final, losses, table
from simulations.studies.beyond.parts import PARTS, UNHARMED, Case

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
    "caf": "CAF",
    "mda": "MDA",
    "nnm": "NNM",
    "bucketing": "Bucketing",
    "centred-clipping": "CentredClipping",
    "arc": "ARC",
    "static-clipping": "StaticClipping",
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
        found = {}
        for (setting, attack), groups in panels(runs, name).items():
            stem = [name, setting.replace(" = ", "").replace(", ", "-"), attack]
            panel = words(setting, attack), groups
            found["_".join(part for part in stem if part)] = panel
        summary.draw(found, name, folder)


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
        lines += table(
            heads,
            [
                [words(*key), *map(_cell, groups.values()), epsilons([*_all(groups)])]
                for key, groups in panels(runs, name).items()
            ],
        )
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


def _all(groups: Panel) -> Iterator[RunRecord]:
    return (run for group in groups.values() for run in group)


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
