"""Prediction against outcome: ``python -m simulations.study withstand``.

`safedshb plan` predicts whether a training withstands colluders, from n, f, the noise,
the schedule, and two numbers about the task. Here 126 federations are trained, on six
tasks with three schedules, under the target attack, under strongest and without one,
and the outcome is held against the prediction: a training withstands if at least half
of the progress that the honest clients make alone stays. None of these settings was
used to find the thresholds of the prediction, and one of the schedules was not either.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flwr_safedshb import theory
from flwr_safedshb.cli._forecast import FederationSpec as Planned
from flwr_safedshb.cli._forecast import Forecast, forecast
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.simulation.task_signal import measure_signal
from simulations.config import compose_config
from simulations.experiment import build_untrained, load_federation
from simulations.models import loss_and_targets
from simulations.results.schema import RunRecord
from simulations.results.tables import Table
from simulations.study import Case, Runs, Section, Study, grid

# Training examples of each task, and the epsilons that are tried on it: from where
# noise drowns everything to where there is hardly any.
TASKS = {
    "phishing": ("data=phishing", 11_055, (0.1, 0.3, 1.0, 3.0)),
    "synthetic, d = 200": (
        "data=synthetic data.num_examples=6000 data.num_features=199",
        4_800,
        (0.3, 1.0, 5.0, 20.0),
    ),
    "synthetic, d = 21": (
        "data=synthetic data.num_examples=6000 data.num_features=20",
        4_800,
        (0.1, 0.5, 2.0, 8.0),
    ),
    "breast cancer": ("data=breast-cancer", 456, (1.0, 5.0, 20.0, 80.0)),
    "digits": ("data=digits", 1_438, (1.0, 5.0, 20.0, 80.0)),
    "FLCHAIN": ("data=flchain", 5_468, (0.1, 0.5, 2.0, 8.0)),
}
# Each with the index of its epsilon.
FEDERATIONS = (
    (5, 1, 1),
    (7, 1, 0),
    (7, 2, 2),
    (7, 3, 3),
    (10, 1, 3),
    (10, 3, 1),
    (12, 2, 2),
)
# Steps, first rate, momentum, clip, decay, batch (0: all examples).
SCHEDULES = {
    "small batches": (100, 1.0, 0.95, 1.0, "constant", 25),
    "tuned for phishing": (32, 270.0, 0.8, 0.19, "linear", 0),
    "short": (20, 8.0, 0.8, 0.5, "linear", 0),
}
ATTACKS = {"target": "attack=target", "strongest": "attack=strongest +attack.every=4"}
ALONE = "no attack"
AXES = ("task", "schedule", "federation")


def make_cases() -> Iterator[Case]:
    """Yield the runs of each federation, under attack and of the honest alone."""
    for task, (data, examples, epsilons) in TASKS.items():
        for name, (steps, rate, momentum, clip, decay, batch) in SCHEDULES.items():
            for n, f, which in FEDERATIONS:
                epsilon, m = epsilons[which], examples // (n - f)
                attacked = f"num_nodes={n} num_malicious_nodes={f} aggregation=smea"
                alone = f"num_nodes={n - f} num_malicious_nodes=0 aggregation=average"
                yield from grid(
                    "model=logistic",
                    "output=average",
                    "weight_decay=1e-4",
                    f"evaluate_every={steps}",
                    f"steps={steps}",
                    f"server_learning_rate={rate:g}",
                    f"momentum={momentum:g}",
                    f"schedule={decay}",
                    f"privacy.plan.clip_norm={clip:g}",
                    f"privacy.plan.batch_size={batch or m}",
                    f"privacy.target_epsilon={epsilon:g}",
                    task={task: data},
                    schedule={name: ""},
                    federation={f"{n}, {f}, epsilon {epsilon:g}": ""},
                    attack={
                        **{k: f"{attacked} {text}" for k, text in ATTACKS.items()},
                        ALONE: f"{alone} attack=none",
                    },
                )


@dataclass(frozen=True)
class Outcome:
    """Prediction and result of a setting.

    Attributes
    ----------
    labels : tuple of str
        Task, schedule, federation.
    predicted : Forecast
    first, unharmed, attacked : float
        Losses on the test set: before the first step, and of the model that is
        returned, without adversaries and under the worse attack.
    """

    labels: tuple[str, ...]
    predicted: Forecast
    first: float
    unharmed: float
    attacked: float

    @property
    def withstood(self) -> bool:
        """Whether there was progress, and at least half of it has stayed."""
        half = (self.first + self.unharmed) / 2
        return self.unharmed < self.first and self.attacked < half

    @property
    def is_wrong(self) -> bool:
        """Whether the other outcome was predicted."""
        said = self.predicted.verdict
        if said == "cannot say":
            return False
        return (said == "will withstand") != self.withstood


def predict(overrides: Sequence[str]) -> Forecast:
    """Return what ``safedshb plan`` says of an attacked run, from its first model."""
    text = shlex.join(overrides)
    cfg, data = compose_config(text), load_federation(text)
    model, plan = build_untrained(text), cfg.privacy.plan
    loss, targets = loss_and_targets(model, data.training)
    task = measure_signal(model, loss, data.training[0], targets, plan.clip_norm)
    clipped = ClippedGradients(model, loss, plan.clip_norm)
    gradients = np.array(
        [
            clipped.flat_sum(inputs, own).numpy() / len(own)
            for inputs, own in zip(
                (inputs for inputs, _ in data.shards),
                targets.split(list(data.sizes)),
                strict=True,
            )
        ]
    )
    return forecast(
        Planned(
            n=cfg.num_nodes,
            f=cfg.num_malicious_nodes,
            m=min(data.sizes),
            d=gradients.shape[1],
            b=plan.batch_size,
            clip_norm=plan.clip_norm,
            steps=cfg.steps,
            delta=cfg.privacy.delta,
            sampling=plan.sampling,
            epsilon=cfg.privacy.target_epsilon,
            heterogeneity=theory.heterogeneity(gradients)[1],
            momentum=cfg.momentum,
            # Noise alone turns some signals, and then nothing is withstood.
            signal=max(task.signal, 1e-12),
            distance=task.distance,
            learning_rate=cfg.server_learning_rate,
            decay="linear" if "Linear" in cfg.schedule["_target_"] else "constant",
        )
    )


def find_outcomes(runs: Runs[RunRecord]) -> list[Outcome]:
    """Return the outcome of each setting, averaged over seeds."""
    found = []
    for labels in dict.fromkeys(tuple(c.labels.values())[:-1] for c in runs):
        groups = runs.where(**dict(zip(AXES, labels, strict=True))).groups("attack")
        after = {
            k: [run["returned"]["test_loss"] for run in v] for k, v in groups.items()
        }
        if {ALONE, *ATTACKS} - groups.keys():
            continue
        first = [run["evaluations"]["test_loss"][0] for run in groups[ALONE]]
        overrides = groups["target"][0]["overrides"]
        found.append(
            Outcome(
                labels,
                predict(
                    [o for o in overrides if not o.startswith("seed=")] + ["seed=1"]
                ),
                float(np.mean(first)),
                float(np.mean(after[ALONE])),
                max(float(np.mean(after[attack])) for attack in ATTACKS),
            )
        )
    return found


def describe_reliability(found: Sequence[Outcome]) -> str:
    """Say how often each verdict was right, and how often there was one."""
    parts = []
    for verdict in ("will withstand", "will not withstand"):
        some = [one for one in found if one.predicted.verdict == verdict]
        wrong = sum(one.is_wrong for one in some)
        parts.append(f"\u201c{verdict}\u201d was wrong in {wrong} of {len(some)}")
    silent = [one for one in found if one.predicted.verdict == "cannot say"]
    return (
        f"Of {len(found)} settings {1.0 - len(silent) / len(found):.0%} got an answer. "
        f"{'; '.join(parts)}. Of {len(silent)} settings it said that it cannot say; "
        f"{sum(one.withstood for one in silent)} of these withstood."
    )


def report(runs: Runs[RunRecord]) -> Iterator[Section]:
    """Yield predictions beside results."""
    heads = ["task", "schedule", "n, f, epsilon", "push/signal", "reach/way"]
    heads += ["loss: first", "no attack", "worse attack", "withstands", "predicted"]
    rows, found = [], find_outcomes(runs)
    for one in found:
        plan, spec = one.predicted, one.predicted.spec
        ratios = theory.attack_ratios(
            plan.push, spec.signal or 0.0, spec.distance or 0.0, spec.path
        )
        losses = (one.first, one.unharmed, one.attacked)
        said = str(plan.verdict)
        rows.append(
            [*one.labels]
            + [f"{value:.3g}" for value in (*ratios, *losses)]
            + ["yes" if one.withstood else "no"]
            + [f"**{said}**" if one.is_wrong else said]
        )
    table = Table([*heads], rows)
    yield Section("Prediction and outcome", describe_reliability(found), table)


study = Study(
    "withstand",
    "Which federations withstand colluders, against what the plan predicts",
    "A training withstands if at least half of the progress that the honest clients "
    "make alone stays under the worse of the target attack and strongest.",
    list(make_cases()),
    seeds=(1,),
    report=report,
    page="docs/robustness.md",
)
