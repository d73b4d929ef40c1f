"""Pages of HTML for a run, a study or a multirun, with everything in them.

``python -m simulations.results.report RESULT.json ... --output report.html``. A page
loads nothing: pictures are inside it, and it reads on a phone as on a desk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from flwr_safedshb.atomic_io import replace_file
from simulations.command import Parser, prepare_file, print_settings_errors
from simulations.config import explain_errors
from simulations.results import page, plots
from simulations.results.comparison import ATTACK_WORDS, name_panel
from simulations.results.plots import Floats
from simulations.results.rounds import rounds_section
from simulations.results.schema import RunRecord
from simulations.results.statistics import QUANTITIES, curve
from simulations.results.sweep import Training, write_csv
from simulations.results.tables import MAX_ROWS, slugify
from simulations.study import Case, Runs, Section, Study

TITLES = {"accuracy": "Test accuracy", "training_loss": "Training loss"}
BINS = 80


def run_page(run: RunRecord) -> str:
    """Return the page of one run."""
    # Flower comes with it, and reports of studies without training need none.
    from simulations.results.answers import answers_section, nodes_section

    config = run["config"]
    title = " ".join(run["overrides"]) or "default configuration"
    epsilon = run["privacy"]["epsilon"]
    cards = {
        "test accuracy": f"{run['evaluations']['accuracy'][-1]:.3f}",
        "training loss": f"{run['evaluations']['training_loss'][-1]:.3f}",
        "epsilon of each honest node": "∞" if epsilon is None else f"{epsilon:.4g}",
        "nodes, of which f adversarial": (
            f"{config['num_nodes']}, {config['num_malicious_nodes']}"
        ),
        "aggregation": _kind(config["aggregation"]),
        "attack": _kind(config["attack"]),
        "steps": str(config["steps"]),
        "seconds": f"{run['seconds']:.1f}",
    }
    body = [
        f"<h1>Safe-DSHB: one run</h1><p><code>{escape(title)}</code></p>",
        page.cards(cards),
        "<h2>Training</h2>",
        page.pictures([_draw_curves(run, quantity) for quantity in QUANTITIES]),
        "<h2>Who was left out</h2>",
        _left_out([run]),
        rounds_section({"this run": [run]}),
        answers_section({"this run": [run]}),
        nodes_section([run]),
        "<h2>Excluded replies</h2>",
        _excluded([run]),
        _privacy([run]),
        "<h2>Data</h2>",
        page.table(["", ""], [[_words(k), str(v)] for k, v in run["data"].items()]),
        "<h2>Configuration</h2>",
        _configuration(run),
    ]
    return page.whole(title, body)


def write_report(
    path: Path, study: Study, sections: Sequence[Section], runs: Runs[Any]
) -> None:
    """Write the page of a study; beside it its figures and its long tables."""
    folder = path.parent
    body = [page.heading(1, study.title), page.markdown(study.question)]
    cards = {
        "runs": str(len(runs)),
        "seeds": ", ".join(map(str, runs.seeds)),
        "seconds, all runs": f"{sum(r['seconds'] for r in runs.values()):.0f}",
    }
    body.append(page.cards(cards))
    body.append(page.markdown("Every run is a row of [results.csv](results.csv)."))
    for section in sections:
        body += [page.heading(2, section.title), page.markdown(section.text)]
        body.append(page.pictures(_draw_section(section, folder / "figures")))
        if section.table is not None:
            body.append(_table(section, folder))
        body.append(page.markdown(section.notes))
    if study.measure is None:
        body += _training_sections(runs, {**ATTACK_WORDS, **study.words})
    path.write_text(page.whole(study.title, body))


def _table(section: Section, folder: Path) -> str:
    table = section.table
    assert table is not None
    made = page.table(table.heads, table.rows)
    if table.is_short:
        return made
    name = f"{slugify(section.title)}.csv"
    replace_file(folder / name, lambda file: file.write(table.csv.encode()))
    link = page.markdown(f"The same as a file: [{name}]({name}).")
    return page.details(f"Table of {len(table.rows)} rows", made + link)


def _draw_section(section: Section, folder: Path) -> list[str]:
    """Write a section's figures as PNG and SVG; return them as pictures of the page."""
    pictures, stem = [], slugify(section.title)
    for title, by_quantity in section.panels.items():
        for quantity, curves in by_quantity.items():
            figure = plots.panel(curves, quantity, title)
            plots.save(figure, folder / f"{stem}_{slugify(title)}_{quantity}")
            pictures.append(page.picture(figure, ""))
    quantities = {quantity for some in section.panels.values() for quantity in some}
    for quantity in sorted(quantities):
        content = {title: some[quantity] for title, some in section.panels.items()}
        plots.save(plots.panels(content, quantity), folder / f"{stem}_{quantity}")
    for caption, figure in section.figures.items():
        plots.save(figure, folder / slugify(caption))
        pictures.append(page.picture(figure, caption))
    return pictures


def _training_sections(runs: Runs[RunRecord], words: Mapping[str, str]) -> list[str]:
    """Return what every report of trainings ends with."""
    from simulations.results.answers import answers_section, nodes_section

    groups: dict[str, list[RunRecord]] = {}
    for case, run in runs.items():
        # A number says nothing without its axis.
        labels = [
            f"{axis} {label}" if label[:1].isdigit() else label
            for axis, label in case.labels.items()
        ]
        groups.setdefault(name_panel(labels, words), []).append(run)
    records = list(runs.values())
    rows = [[label, *_shares_by_kind(some)] for label, some in groups.items()]
    body = []
    if told := [row for row in rows if row[1:] != ["-", "-"]]:
        heads = ["runs", "an adversary was left out", "an honest node was left out"]
        text = (
            "In how many of 100 steps the rule gave an adversary, or an honest node, "
            "no weight: means over such nodes, steps and seeds. Adversaries who hide "
            "among the honest nodes stay in."
        )
        shown = page.table(heads, told)
        strips = [
            f"<h3>{escape(label)}</h3>{_left_out(some)}"
            for label, some in groups.items()
            if _tells(some)
        ]
        body += [
            page.heading(2, "Who was left out of the aggregate"),
            page.markdown(text),
            shown if len(told) <= MAX_ROWS else page.details("Table", shown),
            page.details("By step", "".join(strips)),
        ]
    body += [rounds_section(groups), answers_section(groups), nodes_section(records)]
    body += [page.heading(2, "Excluded replies"), _excluded(records)]
    return [
        *body,
        _privacy(records),
        page.heading(2, "Configuration"),
        _configuration(records[0]),
    ]


def label_runs(records: Sequence[RunRecord]) -> Runs[RunRecord]:
    """Return runs by the overrides in which they differ, which become their labels."""
    given = [
        {one.partition("=")[0]: one.partition("=")[2] for one in run["overrides"]}
        for run in records
    ]
    every = dict.fromkeys(key for one in given for key in one if key != "seed")
    axes = [key for key in every if len({one.get(key) for one in given}) > 1]
    # Runs that differ in their seed alone are one group.
    axes = axes or ["engine"]
    return Runs(
        {
            Case(
                {key.lstrip("+"): one.get(key, "default") for key in axes},
                seed=run["seed"],
            ): run
            for one, run in zip(given, records, strict=True)
        }
    )


def write_joint_report(
    path: Path, records: Sequence[RunRecord], title: str = "Safe-DSHB: several runs"
) -> None:
    """Write the page of runs that belong together; ``results.csv`` and plots beside."""
    runs, folder = label_runs(records), path.parent
    study = Study("runs", title, "", ())
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "results.csv", runs, Training())
    write_report(path, study, study.sections(runs), runs)


def shares_left_out(runs: Sequence[RunRecord]) -> Floats:
    """Return how often each node was left out, (nodes, bins), in bins of steps.

    NaN where the rule did not tell.
    """
    nodes, steps = len(runs[0]["nodes"]), len(runs[0]["rounds"]["left_out"])
    out = np.full((len(runs), nodes, steps), np.nan)
    for r, run in enumerate(runs):
        for step, left in enumerate(run["rounds"]["left_out"]):
            if left is not None:
                out[r, :, step] = 0.0
                out[r, left, step] = 1.0
    parts = np.array_split(out, min(BINS, steps), axis=2)
    return np.stack([_mean(part.swapaxes(1, 2)) for part in parts], axis=1)


def _mean(values: Floats) -> Floats:
    """Average over runs and steps of (runs, steps, nodes), where there are any."""
    known = ~np.isnan(values)
    count = known.sum(axis=(0, 1))
    total = np.where(known, values, 0.0).sum(axis=(0, 1))
    share: Floats = np.full(len(count), np.nan)
    np.divide(total, count, out=share, where=count > 0)
    return share


def _tells(runs: Sequence[RunRecord]) -> bool:
    return any(any(run["rounds"]["left_out"]) for run in runs)


def _left_out(runs: Sequence[RunRecord]) -> str:
    if not _tells(runs):
        return "<p>The rule left nobody out, or does not tell whom.</p>"
    run = runs[0]
    names = [
        f"{name}, adversary" if i in run["adversaries"] else name
        for i, name in enumerate(run["nodes"])
    ]
    last = len(run["rounds"]["left_out"])
    figure = plots.strip(shares_left_out(runs), names, last)
    return page.picture(figure, "Share of the steps in which each node had no weight.")


def _excluded(runs: Sequence[RunRecord]) -> str:
    totals: dict[str, int] = {}
    for run in runs:
        for reason, counts in run["rounds"]["excluded"].items():
            totals[reason] = totals.get(reason, 0) + sum(counts)
    skipped = sum(sum(run["rounds"]["skipped"]) for run in runs)
    text = f"<p>Rounds skipped: {skipped}.</p>"
    if not totals:
        return f"<p>No reply was excluded.</p>{text}"
    rows = [[_words(reason), str(count)] for reason, count in totals.items()]
    return page.table(["reason", "replies"], rows) + text


def _privacy(runs: Sequence[RunRecord]) -> str:
    heads = ["ε", "δ", "noise", "m", "steps", "sampler", "adjacency", "accountant"]
    found: dict[tuple[str, ...], None] = {}
    for run in runs:
        said = run["privacy"]
        plan = run["config"]["privacy"]["plan"]  # type: ignore[index]
        own = [node["noise_multiplier"] for node in run["by_node"]]
        column = (
            "∞" if said["epsilon"] is None else f"{said['epsilon']:.4g}",
            f"{said['delta']:g}",
            f"{max(own, default=plan['noise_multiplier']):.4g}",
            str(said["num_examples"]),
            str(said["steps"]),
            said["sampler"],
            said["adjacency"],
            said["accountant"],
        )
        found[column] = None
    # Down the page and not across it, for phones.
    rows = [list(row) for row in zip(heads, *found, strict=True)]
    notes = {run["privacy"]["note"]: run["privacy"]["seeded_noise"] for run in runs}
    return (
        "<h2>Privacy spent</h2><p>By each honest node, against everyone else, the "
        "server included; of nodes with different m, by the one that holds the fewest "
        "examples. Noise is its multiplier, in units of 2C/b.</p>"
        + page.table([""] * len(rows[0]), rows)
        + "".join(
            f'<p class="{"warning" if seeded else ""}">{escape(note)}</p>'
            for note, seeded in notes.items()
        )
    )


def _shares_by_kind(runs: Sequence[RunRecord]) -> list[str]:
    if not _tells(runs):
        return ["-", "-"]
    shares = np.nanmean(shares_left_out(runs), axis=1)
    hostile = np.isin(np.arange(len(shares)), runs[0]["adversaries"])
    return [
        f"{100 * shares[kind].mean():.0f} %" if kind.any() else "-"
        for kind in (hostile, ~hostile)
    ]


def _draw_curves(run: RunRecord, quantity: str) -> str:
    curves = {"this run": curve([run], quantity)}
    return page.picture(plots.panel(curves, quantity, TITLES[quantity]), "")


def _configuration(run: RunRecord) -> str:
    content = {"config": run["config"], "versions": run["versions"]}
    text = escape(json.dumps(content, indent=2))
    return page.details("Resolved configuration and versions", f"<pre>{text}</pre>")


def _kind(part: object) -> str:
    values = part if isinstance(part, dict) else {}
    return str(values.get("_target_", values.get("name", "none"))).rsplit(".", 1)[-1]


def _words(name: str) -> str:
    return name.replace("_", " ").replace("-", " ")


@print_settings_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Write the report of the runs in some files."""
    parser = Parser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    from simulations.results import record

    parser.add_argument("--output", type=Path, default=Path("report.html"))
    args = parser.parse_args(argv)
    runs = []
    for path in args.files:
        with explain_errors():
            run = record.read(path)
        if run is None:
            parser.error(f"{path} is not the result of a run")
        runs.append(run)
    prepare_file(args.output)
    if len(runs) == 1:
        args.output.write_text(run_page(runs[0]))
    else:
        write_joint_report(args.output, runs)
    print(f"report: {args.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
