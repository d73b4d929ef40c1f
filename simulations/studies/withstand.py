"""Prediction against outcome: ``python -m simulations.study withstand``.

`safedshb plan` predicts whether a training withstands colluders, from n, f, the noise
and the gradient at the first model. Here eighty federations are trained on the paper's
task with SMEA, under the strongest attack and without one, and the outcome is held
against the prediction: a training withstands if at least half of the progress that the
honest clients make alone stays.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from flwr_safedshb import theory
from flwr_safedshb.cli._forecast import FederationSpec as Planned
from flwr_safedshb.cli._forecast import Forecast, forecast
from simulations.config import compose_config
from simulations.experiment import build_untrained, load_federation
from simulations.models import loss_gradient
from simulations.results.schema import RunRecord
from simulations.results.statistics import late
from simulations.results.tables import Table
from simulations.study import Case, Runs, Section, Study, grid

# Clients and adversaries: from a tenth to three sevenths of them.
FEDERATIONS = ((10, 1), (9, 1), (9, 2), (7, 1), (7, 2), (7, 3), (5, 1), (5, 2))
NOISES = (0.5, 1.0, 2.0, 4.0)
MOMENTUMS = (0.99, 0.95)
# Clients whose shares of the labels differ are tried with less noise.
ALPHA = 10.0
FEW_NOISES = (0.5, 1.0)
# How far the model moves to see how the gradient changes.
MOVE = 1e-3
# The plan's margin was set on runs with this noise; the others try it.
TUNED_NOISE = "1"


def make_cases() -> Iterator[Case]:
    """Yield the runs of each federation, under attack and of the honest alone."""
    key = "privacy.plan.noise_multiplier"
    unlike = {f"Dirichlet {ALPHA:g}": f"split=dirichlet split.alpha={ALPHA:g}"}
    settings = (
        (NOISES, MOMENTUMS, {"iid": "split=iid"}),
        (FEW_NOISES, MOMENTUMS[:1], unlike),
    )
    for (n, f), (noises, momentums, shares) in product(FEDERATIONS, settings):
        attacked = f"num_nodes={n} num_malicious_nodes={f} aggregation=smea "
        alone = f"num_nodes={n - f} num_malicious_nodes=0 aggregation=average "
        yield from grid(
            "experiment=paper",
            n={f"{n}": ""},
            f={f"{f}": ""},
            noise={f"{noise:g}": f"{key}={noise:g}" for noise in noises},
            momentum={f"{beta:g}": f"momentum={beta:g}" for beta in momentums},
            shares=shares,
            attack={
                "strongest": f"{attacked} attack=strongest",
                "no attack": f"{alone} attack=none",
            },
        )


@dataclass(frozen=True)
class Outcome:
    """Prediction and result of a setting.

    Attributes
    ----------
    labels : tuple of str
        n, f, noise, momentum, shares.
    predicted : Forecast
    first, unharmed, attacked : float
        Training losses: before the first step, and over the last quarter of the steps
        without adversaries and with them.
    """

    labels: tuple[str, ...]
    predicted: Forecast
    first: float
    unharmed: float
    attacked: float

    @property
    def withstood(self) -> bool:
        """Whether at least half of the progress has stayed."""
        return self.attacked < (self.first + self.unharmed) / 2

    @property
    def agrees(self) -> bool:
        """Whether that was predicted."""
        return self.withstood == self.predicted.withstands

    @property
    def was_tuned_on(self) -> bool:
        """Whether the plan's margin was set on this setting."""
        return self.labels[2] == TUNED_NOISE and self.labels[4] == "iid"


def predict(overrides: Sequence[str]) -> Forecast:
    """Return what ``safedshb plan`` says before a run, from the first model alone."""
    text = shlex.join(overrides)
    cfg, data = compose_config(text), load_federation(text)
    model = copy.deepcopy(build_untrained(text))
    shards = [[shard] for shard in data.shards]
    gradients = np.array([loss_gradient(model, s, cfg.weight_decay) for s in shards])
    gradient = gradients.mean(axis=0).astype(np.float64)
    length = float(np.linalg.norm(gradient))
    _move(model, gradient / length)
    moved = np.mean([loss_gradient(model, s, cfg.weight_decay) for s in shards], axis=0)
    curvature = float((moved - gradient) @ gradient / length) / MOVE
    plan = cfg.privacy.plan
    return forecast(
        Planned(
            n=cfg.num_nodes,
            f=cfg.num_malicious_nodes,
            m=min(data.sizes),
            d=len(gradient),
            b=plan.batch_size,
            clip_norm=plan.clip_norm,
            steps=cfg.steps,
            delta=cfg.privacy.delta,
            sampling=plan.sampling,
            epsilon=None,
            noise_multiplier=plan.noise_multiplier,
            heterogeneity=theory.heterogeneity(gradients)[1],
            momentum=cfg.momentum,
            gradient=length,
            learning_rate=cfg.server_learning_rate,
            smoothness=max(0.0, curvature),
        )
    )


def _move(model: nn.Module, direction: NDArray[np.float64]) -> None:
    """Move a model by a small step, in place."""
    trained = [p for p in model.parameters() if p.requires_grad]
    vector = nn.utils.parameters_to_vector(trained).detach()
    vector += MOVE * torch.from_numpy(direction).to(vector.dtype)
    nn.utils.vector_to_parameters(vector, trained)


def find_outcomes(runs: Runs[RunRecord]) -> list[Outcome]:
    """Return the outcome of each setting, averaged over seeds."""
    found = []
    for labels in dict.fromkeys(tuple(c.labels.values())[:-1] for c in runs):
        axes = ("n", "f", "noise", "momentum", "shares")
        both = runs.where(**dict(zip(axes, labels, strict=True))).groups("attack")
        attacked, unharmed = both["strongest"], both["no attack"]
        first = np.mean([run["evaluations"]["training_loss"][0] for run in attacked])
        # The first seed's model and data, as a user who plans has one of each.
        overrides = [o for o in attacked[0]["overrides"] if not o.startswith("seed=")]
        found.append(
            Outcome(
                labels,
                predict([*overrides, "seed=1"]),
                float(first),
                float(late(unharmed, "training_loss").mean()),
                float(late(attacked, "training_loss").mean()),
            )
        )
    return sorted(found, key=lambda one: one.predicted.radius * one.predicted.swing)


def describe_agreement(found: Sequence[Outcome]) -> str:
    """Say how often prediction and result agree."""
    tuned = [one for one in found if one.was_tuned_on]
    tried = [one for one in found if not one.was_tuned_on]
    parts = [
        f"{sum(one.agrees for one in some)} of {len(some)} {words}"
        for some, words in (
            (found, "settings"),
            (tried, "that the margin was not set on"),
            (tuned, "that it was set on"),
        )
        if some
    ]
    stood = sum(one.withstood for one in found)
    share = sum(one.agrees for one in found) / len(found)
    return (
        f"The prediction agrees with the outcome in {'; '.join(parts)}: {share:.0%}. "
        f"{stood} of {len(found)} withstand."
    )


def report(runs: Runs[RunRecord]) -> Iterator[Section]:
    """Yield predictions beside results."""
    heads = ["n", "f", "noise", "beta", "shares", "epsilon", "radius", "x swing"]
    heads += ["gradient", "loss: first", "no attack", "strongest", "withstands"]
    rows, found = [], find_outcomes(runs)
    for one in found:
        plan = one.predicted
        figures = (plan.epsilon, plan.radius, plan.radius * plan.swing)
        losses = (plan.spec.gradient or 0.0, one.first, one.unharmed, one.attacked)
        said = "yes" if plan.withstands else "no"
        rows.append(
            [*one.labels]
            + [f"{value:.3g}" for value in (*figures, *losses)]
            + ["yes" if one.withstood else "no"]
            + [said if one.agrees else f"**{said}**"]
        )
    table = Table([*heads, "predicted"], rows)
    yield Section("Prediction and outcome", describe_agreement(found), table)


study = Study(
    "withstand",
    "Which federations withstand colluders, against what the plan predicts",
    "A training withstands if at least half of the progress that the honest clients "
    "make alone stays under the strongest attack.",
    list(make_cases()),
    seeds=(1,),
    report=report,
    page="docs/robustness.md",
)
