"""One page of HTML for a run or a sweep, with everything in it.

``python -m simulations.results.report RESULT.json ... --output report.html``. The page
loads nothing: pictures are inside it, and it reads on a phone as on a desk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np

from simulations.command import Parser, complaining, prepare_file
from simulations.config import explained
from simulations.results import page, plots, record
from simulations.results.answers import answers_section, nodes_section
from simulations.results.plots import Floats
from simulations.results.schema import RunRecord
from simulations.results.summary import Groups, curve, final

QUANTITIES = {"accuracy": "Test accuracy", "training_loss": "Training loss"}
BINS = 80


def run_page(run: RunRecord) -> str:
    """Return the page of one run."""
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
        page.pictures([_curves({"this run": [run]}, q) for q in QUANTITIES]),
        "<h2>Who was left out</h2>",
        _left_out([run]),
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


def sweep_page(
    title: str, panels: Mapping[str, Groups], notes: str = "", lead: str = ""
) -> str:
    """Return the page of a sweep.

    Parameters
    ----------
    title : str
    panels : mapping of title to groups
        Each is drawn as one panel for each quantity, one curve for each group.
    notes : str
        Text to show as it is, after the results.
    lead : str
        What the page is about, in a paragraph.
    """
    some_runs = (
        run for groups in panels.values() for g in groups.values() for run in g
    )
    # A benchmark may stand in several panels.
    runs = list({id(run): run for run in some_runs}.values())
    seeds = sorted({run["seed"] for run in runs})
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(lead)}</p>" if lead else "",
        page.cards(
            {
                "runs": str(len(runs)),
                "seeds": ", ".join(map(str, seeds)),
                "seconds, all runs": f"{sum(run['seconds'] for run in runs):.0f}",
            }
        ),
        "<h2>Results</h2>",
        "<p>Accuracy is that of the model returned, on the test set, mean ± standard "
        "deviation over the seeds; beside it the epsilon of each honest node, and in "
        "how many of 100 chances the rule left an adversary, or an honest node, out: "
        "those who hide among the honest stay in. Lines are means over the seeds, "
        "shades one standard deviation.</p>",
    ]
    for name, groups in panels.items():
        body.append(f"<h3>{escape(name)}</h3>{_finals(groups)}")
        body.append(page.pictures([_curves(groups, q) for q in QUANTITIES]))
        told = {label: some for label, some in groups.items() if _tells(some)}
        strips = [f"<h3>{escape(k)}</h3>{_left_out(v)}" for k, v in told.items()]
        if strips:
            body.append(page.details("Who was left out, by step", "".join(strips)))
        body.append(answers_section(groups))
    body.append(nodes_section(runs))
    body += ["<h2>Excluded replies</h2>", _excluded(runs), _privacy(runs)]
    if notes:
        body += ["<h2>Notes</h2>", f'<pre class="notes">{escape(notes)}</pre>']
    body += ["<h2>Configuration</h2>", _configuration(runs[0])]
    return page.whole(title, body)


def grouped(runs: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Put runs together that differ in their seed alone."""
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        rest = [part for part in run["overrides"] if not part.startswith("seed=")]
        groups.setdefault(" ".join(rest) or "default", []).append(run)
    return groups


def epsilons(runs: Sequence[RunRecord]) -> str:
    """Return the epsilons of some runs, from the smallest to the largest."""
    found = [run["privacy"]["epsilon"] for run in runs]
    values = sorted(float("inf") if e is None else e for e in found)
    words = ["∞" if e == float("inf") else f"{e:.3g}" for e in values]
    return words[0] if words[0] == words[-1] else f"{words[0]} to {words[-1]}"


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
        + page.table([""], rows)
        + "".join(
            f'<p class="{"warning" if seeded else ""}">{escape(note)}</p>'
            for note, seeded in notes.items()
        )
    )


def _finals(groups: Groups) -> str:
    rows = []
    for label, some in groups.items():
        cells = [label, str(final(some)), epsilons(some)]
        rows.append(cells + _shares_by_kind(some))
    return page.table(["", "accuracy", "ε", "adversary out", "honest out"], rows)


def _shares_by_kind(runs: Sequence[RunRecord]) -> list[str]:
    if not _tells(runs):
        return ["-", "-"]
    shares = np.nanmean(shares_left_out(runs), axis=1)
    hostile = np.isin(np.arange(len(shares)), runs[0]["adversaries"])
    return [
        f"{100 * shares[kind].mean():.0f}" if kind.any() else "-"
        for kind in (hostile, ~hostile)
    ]


def _curves(groups: Groups, quantity: str) -> str:
    curves = {label: curve(some, quantity) for label, some in groups.items()}
    return page.picture(plots.panel(curves, quantity, QUANTITIES[quantity]), "")


def _configuration(run: RunRecord) -> str:
    content = {"config": run["config"], "versions": run["versions"]}
    text = escape(json.dumps(content, indent=2))
    return page.details("Resolved configuration and versions", f"<pre>{text}</pre>")


def _kind(part: object) -> str:
    values = part if isinstance(part, dict) else {}
    return str(values.get("_target_", values.get("name", "-"))).rsplit(".", 1)[-1]


def _words(name: str) -> str:
    return name.replace("_", " ").replace("-", " ")


@complaining
def main(argv: Sequence[str] | None = None) -> int:
    """Write the page of the runs in some files."""
    parser = Parser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path("report.html"))
    args = parser.parse_args(argv)
    runs = []
    for path in args.files:
        with explained():
            run = record.read(path)
        if run is None:
            parser.error(f"{path} is not the result of a run")
        runs.append(run)
    prepare_file(args.output)
    if len(runs) == 1:
        text = run_page(runs[0])
    else:
        text = sweep_page("Safe-DSHB: a sweep", {"All runs": grouped(runs)})
    args.output.write_text(text)
    print(f"report: {args.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
