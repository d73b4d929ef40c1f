"""The arena: ``python -m simulations.study arena``.

Private and robust learning, each entry under the worst attack that knows it. An entry
is a rule and a schedule on private momentums at the task's epsilon; the score is the
accuracy that is left. ``--own MODULE:NAME`` adds an `Entry` of one's own.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib import style
from matplotlib.figure import Figure

from simulations.command import Parser
from simulations.config import SettingsError
from simulations.results.plots import LOOKS, STYLE
from simulations.results.schema import RunRecord
from simulations.results.statistics import MeanStd, final, mean_std
from simulations.results.tables import Table
from simulations.study import Case, Runs, Section, Study, grid

NO_ATTACK = "no attack"
# Those of Phishing were found on seeds 101 to 106, that of the tumours on none.
PAPER, FULL = "paper", "full batch"


@dataclass(frozen=True)
class Entry:
    """What takes part.

    Attributes
    ----------
    name : str
    overrides : str
        The rule, and whatever else the entry chooses.
    assumes : str
        What it takes for granted beyond f < n/2 and private momentums.
    schedule : {"paper", "full batch"}
        Which of the task's schedules it trains with.
    """

    name: str
    overrides: str
    assumes: str = "nothing more"
    schedule: str = FULL


ENTRIES = (
    Entry("SMEA", "aggregation=smea"),
    Entry("Filter", "aggregation=filter"),
    Entry(
        "SMEA, paper's schedule", "aggregation=smea", "small batches", schedule=PAPER
    ),
    Entry("no rule (DP-FedAvg)", "aggregation=average", "that all clients are honest"),
    Entry("Krum", "aggregation=krum", "n > 2f + 2; Flower's Krum on momentums"),
    Entry("MultiKrum", "aggregation=multi-krum", "n > 2f + 2; Flower's MultiKrum"),
    Entry("FedMedian", "aggregation=median", "Flower's FedMedian on momentums"),
    Entry("FedTrimmedAvg", "aggregation=trimmed-mean", "Flower's, with beta = f/n"),
    Entry("CAF", "aggregation=caf", "CafCor's rule; noise without correlation"),
)


@dataclass(frozen=True)
class Task:
    """A federation with its data, model, adversaries and epsilon.

    Attributes
    ----------
    title : str
    overrides : str
        Of all runs.
    schedules : mapping
        Overrides of the paper's schedule and of one with full batches.
    num_weights : int
        d.
    """

    title: str
    overrides: str
    schedules: Mapping[str, str]
    num_weights: int


_PHISHING_PAPER = "steps=400 privacy.plan.batch_size=25"
TASKS = {
    "phishing-7-3": Task(
        "Phishing, 3 of 7 hostile, epsilon 1",
        "experiment=paper privacy.target_epsilon=1.0",
        {
            PAPER: _PHISHING_PAPER,
            FULL: "schedule=linear steps=32 server_learning_rate=270 momentum=0.8 "
            "output=average privacy.plan.clip_norm=0.19 privacy.plan.batch_size=2763",
        },
        69,
    ),
    "phishing-7-2": Task(
        "Phishing, 2 of 7 hostile, epsilon 0.3",
        "experiment=paper num_malicious_nodes=2 privacy.target_epsilon=0.3",
        {
            PAPER: _PHISHING_PAPER,
            FULL: "schedule=linear steps=30 server_learning_rate=570 momentum=0.81 "
            "output=average privacy.plan.clip_norm=0.085 privacy.plan.batch_size=2211",
        },
        69,
    ),
    "tumours-7-2": Task(
        "Breast cancer, 2 of 7 hospitals hostile, epsilon 3",
        "data=breast-cancer model=logistic num_malicious_nodes=2 "
        "privacy.delta=0.0001 privacy.target_epsilon=3.0",
        {
            PAPER: "steps=400 momentum=0.99 server_learning_rate=1.0 output=last "
            "privacy.plan.batch_size=25",
            FULL: "steps=40 momentum=0.8 server_learning_rate=5.0 output=average "
            "privacy.plan.clip_norm=0.5 privacy.plan.batch_size=91",
        },
        31,
    ),
}
ATTACKS = {
    NO_ATTACK: "attack=honest",
    "label flip": "attack=label-flip",
    "ALIE": "attack=alie",
    "FOE": "attack=foe",
    "strongest": "attack=strongest",
    "target": "attack=target",
    "lookahead": "attack=lookahead",
}


def add_options(parser: Parser) -> None:
    """Add the choices of tasks, entries and attacks, and entries of one's own."""
    choices = {
        "task": list(TASKS),
        "entry": [entry.name for entry in ENTRIES],
        "attack": list(ATTACKS),
    }
    for axis, labels in choices.items():
        parser.add_argument(f"--{axis}", nargs="+", choices=labels, dest=f"axis {axis}")
    parser.add_argument(
        "--own", nargs="+", default=[], help="MODULE:NAME, an Entry of your own"
    )


def make_cases(args: Namespace) -> Iterator[Case]:
    """Yield the runs, task by task."""
    own = [load_entry(path) for path in vars(args).get("own", [])]
    if chosen := vars(args).get("axis entry"):
        chosen.extend(entry.name for entry in own if entry.name not in chosen)
    for name, task in TASKS.items():
        yield from grid(
            *task.overrides.split(),
            task={name: ""},
            entry={
                one.name: f"{task.schedules[one.schedule]} {one.overrides}"
                for one in (*ENTRIES, *own)
            },
            attack=ATTACKS,
        )


def load_entry(path: str) -> Entry:
    """Return an entry by its import path, ``MODULE:NAME``."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(f"--own {path}: {error}") from error
    if not isinstance(found, Entry):
        raise SettingsError(f"--own {path} is a {type(found).__name__}, and no Entry")
    return found


def report(runs: Runs[RunRecord]) -> Iterator[Section]:
    """Yield a table and a picture for each task, and what the entries assume."""
    for name, some in runs.by("task").items():
        yield compare_entries(TASKS[name], some)
    entered = runs.labels("entry")
    rows = [[one.name, one.assumes] for one in ENTRIES if one.name in entered]
    yield Section(
        "What each entry assumes",
        "All train on the same private momentums, at the same (epsilon, delta) for one "
        "example, with f known to the server.",
        Table(["entry", "assumes also"], rows),
    )


def compare_entries(task: Task, runs: Runs[RunRecord]) -> Section:
    """Return the accuracies of a task's entries, the best worst case first."""
    attacks = runs.labels("attack")
    found = {
        entry: {a: final(group) for a, group in some.groups("attack").items()}
        for entry, some in runs.by("entry").items()
    }
    worst = {entry: find_worst(scores) for entry, scores in found.items()}
    ranked = sorted(found, key=lambda entry: -found[entry][worst[entry]].mean)
    rows = []
    for entry in ranked:
        scores, records = found[entry], list(runs.where(entry=entry).values())
        cells = [str(scores[a]) if a in scores else "-" for a in attacks]
        cells = [
            f"**{cell}**" if a == worst[entry] else cell
            for a, cell in zip(attacks, cells, strict=True)
        ]
        seconds = mean_std([one["seconds"] for one in records]).mean
        steps = records[0]["privacy"]["steps"]
        megabytes = steps * 8 * task.num_weights / 1e6
        rows.append([entry, *cells, f"{seconds:.0f}", f"{megabytes:.2g}"])
    heads = ["entry", *attacks, "s a run", "MB a client"]
    return Section(
        task.title,
        f"Test accuracy of the model that is returned, mean ± standard deviation over "
        f"seeds {', '.join(map(str, runs.seeds))}. The worst column of a row is bold, "
        "and rows are in its order.",
        Table(heads, rows),
        figures={task.title: draw_scores(ranked, found, worst)},
    )


def find_worst(scores: Mapping[str, MeanStd]) -> str:
    """Return the attack that leaves the lowest mean accuracy."""
    return min(scores, key=lambda attack: scores[attack].mean)


def draw_scores(
    entries: Sequence[str],
    found: Mapping[str, Mapping[str, MeanStd]],
    worst: Mapping[str, str],
) -> Figure:
    """Draw each entry without an attack and under its worst one."""
    with style.context(STYLE):
        figure = Figure(figsize=(7.0, 1.2 + 0.4 * len(entries)), layout="constrained")
        axes = figure.subplots()
        for place, entry in enumerate(entries):
            scores = found[entry]
            bars = {NO_ATTACK: LOOKS[5], worst[entry]: LOOKS[2]}
            for shift, (attack, look) in zip((0.2, -0.2), bars.items(), strict=False):
                if (score := scores.get(attack)) is None:
                    continue
                axes.barh(
                    place - shift, score.mean, 0.38, xerr=score.std, color=look.colour
                )
            axes.text(0.01, place + 0.2, worst[entry], va="center", fontsize=8)
        axes.set_yticks(range(len(entries)), entries)
        axes.invert_yaxis()
        axes.set(xlabel="test accuracy: without attack, and under the worst")
    return figure


study = Study(
    "arena",
    "The arena: private and robust learning under the worst attack",
    "Which rule and schedule keep most accuracy at the same epsilon, under the worst "
    "attack that knows them?",
    make_cases,
    seeds=(1, 2, 3, 4, 5),
    report=report,
    add_options=add_options,
)
