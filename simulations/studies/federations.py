"""What a federation needs, measured: ``python -m simulations.study federations``.

Fewer rounds at the same epsilon; the mean of the last models; nodes that hold 50, 500
and 5,000 examples.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console

from simulations.data.files import MISSING_FASHION_MNIST, fashion_mnist
from simulations.results.schema import RunRecord
from simulations.results.statistics import mean_std
from simulations.results.tables import Table
from simulations.study import Case, Runs, Section, Study, grid

WORDS = {
    "foe": "FOE",
    "alie": "ALIE",
    "mimic-shift": "a shifted copy of a client",
    "strongest": "the strongest that we ship",
    "drift": "the same push in every step",
    "sleeper": "the same push, in the last half alone",
}
TEXTS = {
    "local-steps": (
        "Fewer rounds",
        "The same T private steps of every node, and so the same epsilon, in T/K "
        "rounds. The paper's task (T = 400, 3 adversaries among 7); nodes that hold "
        "different shares of the labels (alpha = 1, 2 among 10); a network on "
        "Fashion-MNIST (T = 100, 3 among 10).",
    ),
    "average": (
        "The mean of the last half",
        "The paper's task, 3 adversaries among 7: the last model, and the mean of the "
        "last 200, of the same runs. The last two attacks aim at the mean: pushes the "
        "same way do not even out, and sleepers attack only models that count.",
    ),
    "unequal": (
        "Unequal nodes",
        "The paper's task, honest nodes with 50, 500, 500, 5000 and 5000 examples, "
        "each with the noise that leaves it at epsilon 2, and one adversary; and the "
        "same without the small node.",
    ),
}
UNEQUAL = "experiment=paper split=unequal privacy.target_epsilon=2 "
UNEQUAL += "num_malicious_nodes=1"
FEWER = "split.sizes=[500,500,5000,5000]"


def make_cases(args: Namespace) -> Iterator[Case]:
    """Yield the runs of all parts; some need Fashion-MNIST."""
    tasks = {
        "paper, low privacy": "experiment=paper privacy=low",
        "paper, high privacy": "experiment=paper privacy=high",
        "heterogeneous": "experiment=heterogeneous",
    }
    if (folder := fashion_mnist()) is not None:
        tasks["Fashion-MNIST"] = f"experiment=fashion data.path={folder}"
    elif vars(args):
        words = f"Rows of it are left out: {MISSING_FASHION_MNIST}."
        Console().print(words, style="yellow", highlight=False)
    some = {"nobody": "attack=none", "foe": "attack=foe"}
    some["mimic-shift"] = "attack=mimic-shift"
    yield from grid(
        part={"local-steps": ""},
        row=tasks,
        attack=some,
        column={f"K = {k}": f"local_steps={k}" for k in (1, 2, 5, 10)},
    )
    yield from grid(
        "experiment=paper",
        "output=average",
        part={"average": ""},
        row={"low privacy": "privacy=low", "high privacy": "privacy=high"},
        attack={word: f"attack={word}" for word in WORDS if word != "nobody"},
        column={rule: f"aggregation={rule}" for rule in ("smea", "filter")},
    )
    rules = ("smea", "filter", "geometric-median", "average")
    alone = {"nobody": some.pop("nobody")}
    # Nobody is hostile, but the server expects one: the sizes are the honest nodes'.
    for attacks, n in ((alone, 5), (some, 6)):
        yield from grid(
            part={"unequal": ""},
            row={
                "with the small node": f"num_nodes={n} {UNEQUAL}",
                "without it": f"num_nodes={n - 1} {UNEQUAL} {FEWER}",
            },
            attack=attacks,
            column={rule: f"aggregation={rule}" for rule in rules},
        )


def report(runs: Runs[RunRecord]) -> Iterator[Section]:
    """Yield a table for each part."""
    for part, some in runs.by("part").items():
        title, question = TEXTS[part]
        seeds = "One seed." if len(some.seeds) == 1 else f"{len(some.seeds)} seeds."
        yield Section(title, f"{question} {seeds}", _tabulate(part, some))


def _tabulate(part: str, runs: Runs[RunRecord]) -> Table:
    columns: dict[str, tuple[str, Callable[[RunRecord], float]]] = {}
    for column in runs.labels("column"):
        if part == "average":
            columns[f"{column}, last"] = column, _last_accuracy
            columns[f"{column}, mean"] = column, _returned_accuracy
        else:
            columns[column] = column, _returned_accuracy
    rows = []
    for row, by_row in runs.by("row").items():
        for attack, some in by_row.by("attack").items():
            cells = [
                _average(list(some.where(column=column).values()), value)
                for column, value in columns.values()
            ]
            spent = _largest_epsilon(list(some.values()))
            rows.append([row, spent, WORDS.get(attack, attack), *cells])
    return Table(["setting", "epsilon", "attack", *columns], rows)


def _returned_accuracy(run: RunRecord) -> float:
    return run["returned"]["accuracy"]


def _last_accuracy(run: RunRecord) -> float:
    return run["evaluations"]["accuracy"][-1]


def _average(runs: Sequence[RunRecord], value: Callable[[RunRecord], float]) -> str:
    return str(mean_std([value(run) for run in runs])) if runs else ""


def _largest_epsilon(runs: Sequence[RunRecord]) -> str:
    """Return the epsilon of the node that spends the most, in all of these runs."""
    spent = [run["privacy"]["epsilon"] for run in runs]
    return f"{max(each for each in spent if each is not None):.3g}"


study = Study(
    "federations",
    "What a federation needs",
    "Test accuracy with fewer rounds, averaged models, and nodes of unequal sizes; "
    "where there are several seeds, mean ± standard deviation.",
    make_cases,
    seeds=(1, 2, 3, 4, 5),
    report=report,
    words=WORDS,
    page="docs/federations.md",
)
