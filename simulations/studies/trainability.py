"""Will it train? Verdict against outcome: ``python -m simulations.study trainability``.

`flwr_safedshb.theory.trainability` says before a run whether its noise leaves room to
train. Here ten tasks are trained at six epsilons and three learning rates, without
adversaries, and the outcome is held against the verdict. A training got halfway if its
accuracy is at least half of the way from guessing to the best accuracy that the task
reaches at epsilon 100, both averaged over seeds.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flwr_safedshb.algorithm.expectation import make_load
from flwr_safedshb.theory.trainability import (
    MAX_GROWTH,
    SAFE_LOAD,
    growth,
    walk_length,
)
from simulations.config import compose_config
from simulations.experiment import build_untrained, load_federation, make_share
from simulations.results.schema import RunRecord
from simulations.results.tables import Table
from simulations.study import Case, Runs, Section, Study, grid

COMMON = (
    "engine=batched attack=none num_malicious_nodes=0 aggregation=average momentum=0.9 "
    "weight_decay=0 privacy.delta=1e-5 evaluate_every=1000"
)
# By name: data, model and nodes; T; b.
TASKS = {
    "tumours, linear": ("data=breast-cancer num_nodes=5", 60, 91),
    "tumours, MLP 64": (
        "data=breast-cancer model=mlp model.hidden=[64] num_nodes=5",
        60,
        91,
    ),
    "made up, linear, SMEA": (
        "data=synthetic num_nodes=7 num_malicious_nodes=2 aggregation=smea",
        200,
        25,
    ),
    "made up, 1,000 features": (
        "data=synthetic data.num_features=1000 num_nodes=7",
        60,
        457,
    ),
    "made up, MLP 128": (
        "data=synthetic model=mlp model.hidden=[128] num_nodes=20",
        100,
        160,
    ),
    "digits, linear": ("data=digits num_nodes=7", 60, 205),
    "digits, MLP 32": ("data=digits model=mlp num_nodes=7", 60, 205),
    "digits, MLP 256": (
        "data=digits model=mlp model.hidden=[256] num_nodes=3",
        200,
        64,
    ),
    "digits, MLP 512-256": (
        "data=digits model=mlp model.hidden=[512,256] num_nodes=20",
        40,
        71,
    ),
    "digits, CNN": ("data=digits model=cnn num_nodes=7", 60, 205),
}
EPSILONS = (0.1, 0.3, 1, 3, 10, 100)
# The most that clipped gradients move the model: learning rate times C times T.
PATHS = (5, 20, 80)
WITHOUT_NOISE = f"{EPSILONS[-1]:g}"


def make_cases() -> Iterator[Case]:
    """Yield the runs of each task."""
    for task, (text, steps, batch_size) in TASKS.items():
        yield from grid(
            *shlex.split(f"{COMMON} {text}"),
            f"steps={steps}",
            f"privacy.plan.batch_size={batch_size}",
            task={task: ""},
            epsilon={f"{e:g}": f"privacy.target_epsilon={e:g}" for e in EPSILONS},
            path={f"{p}": f"server_learning_rate={p / steps:.6g}" for p in PATHS},
        )


@dataclass(frozen=True)
class Outcome:
    """A run, and what was known before it.

    Attributes
    ----------
    task, epsilon, path : str
    d : int
    load, growth, norm_ratio : float
        Of the noise; see `flwr_safedshb.theory.trainability`.
    accuracy, chance : float
        At the end, and of guessing.
    """

    task: str
    epsilon: str
    path: str
    d: int
    load: float
    growth: float
    norm_ratio: float
    accuracy: float
    chance: float

    def share(self, best: float) -> float:
        """Return how far it got from guessing to the best."""
        return (self.accuracy - self.chance) / (best - self.chance)


def find_outcomes(runs: Runs[RunRecord]) -> list[Outcome]:
    """Return what was known before each run, and how it ended."""
    found = []
    for case, run in runs.items():
        overrides = [o for o in run["overrides"] if not o.startswith("checkpoint=")]
        text = shlex.join(overrides)
        cfg, data = compose_config(text), load_federation(text)
        layers = [
            (p.numel(), float(p.detach().norm()))
            for p in build_untrained(text).parameters()
            if p.dim() > 1
        ]
        d = sum(p.numel() for p in build_untrained(text).parameters())
        n, f = cfg.num_nodes, cfg.num_malicious_nodes
        plan = make_share(text, data.sizes.index(min(data.sizes))).plan
        load = make_load(plan, cfg.steps, d, n, f)
        rates = cfg.server_learning_rate, cfg.momentum
        walk = walk_length(plan.noise_std, 1, n - f, cfg.steps, *rates)
        found.append(
            Outcome(
                case.labels["task"],
                case.labels["epsilon"],
                case.labels["path"],
                d,
                load.load,
                growth(layers, walk),
                load.norm_ratio,
                run["evaluations"]["accuracy"][-1],
                float(np.bincount(data.test[1].long()).max() / len(data.test[1])),
            )
        )
    return found


def average_seeds(found: Sequence[Outcome]) -> list[Outcome]:
    """Return one outcome for each setting and rate, with its mean accuracy."""
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for one in found:
        groups.setdefault((one.task, one.epsilon, one.path), []).append(one)
    return [
        replace(some[0], accuracy=float(np.mean([one.accuracy for one in some])))
        for some in groups.values()
    ]


def report(runs: Runs[RunRecord]) -> Iterator[Section]:
    """Yield how often verdicts are right, and every setting."""
    found = average_seeds(find_outcomes(runs))
    best = {
        task: max(one.accuracy for one in found if one.task == task)
        for task in dict.fromkeys(one.task for one in found)
    }
    settings: dict[tuple[str, str], list[Outcome]] = {}
    for one in found:
        settings.setdefault((one.task, one.epsilon), []).append(one)
    rows, hopeless, roomy = [], [], []
    for some in sorted(settings.values(), key=lambda some: some[0].load):
        top = max(some, key=lambda one: one.accuracy)
        share = top.share(best[top.task])
        if top.load > 1.0:
            hopeless.append(share)
        elif top.load < SAFE_LOAD and top.epsilon != WITHOUT_NOISE:
            roomy.append(share)
        shown = [f"{top.load:.2g}", f"{top.norm_ratio:.3g}", f"{top.accuracy:.2f}"]
        rows.append([top.task, f"{top.d:,}", top.epsilon, *shown, f"{share:.2f}"])
    blown = [one.share(best[one.task]) for one in found if one.growth > MAX_GROWTH]
    text = (
        f"Load above 1, at the best of the rates: {_count(hopeless, below=True)} "
        f"settings did not get halfway. Load below {SAFE_LOAD:g}: "
        f"{_count(roomy, below=False)} did. Growth above {MAX_GROWTH:g}: "
        f"{_count(blown, below=True)} runs did not. Of {len(found)} runs of "
        f"{len(settings)} settings."
    )
    heads = ["task", "weights", "epsilon", "load", "noise norm", "accuracy", "share"]
    yield Section("Verdict and outcome", text, Table(heads, rows))


def _count(shares: Sequence[float], *, below: bool) -> str:
    right = sum((share < 0.5) == below for share in shares)
    return f"{right} of {len(shares)}"


study = Study(
    "trainability",
    "Will it train? Verdict against outcome",
    "Does a training get halfway from guessing to the best that its task allows, where "
    "the verdict before it says that it will, or that it will not?",
    list(make_cases()),
    # The limits were fitted on seed 1. A random model may be lucky once.
    seeds=(2, 3, 4),
    report=report,
)
