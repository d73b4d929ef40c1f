"""What the plan predicts of a setting, and what came of its runs."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from flwr_safedshb import theory
from flwr_safedshb.cli._forecast import FederationSpec as Planned
from flwr_safedshb.cli._forecast import Forecast, forecast
from simulations.config import composed
from simulations.experiment import federation, untrained
from simulations.models import loss_gradient
from simulations.results.schema import RunRecord
from simulations.results.summary import late, table
from simulations.studies.withstand.cases import Case, Setting

# How far the model moves to see how the gradient changes.
_MOVE = 1e-3
# The margin was set on these; the others try it.
TUNED = 1.0


@dataclass(frozen=True)
class Outcome:
    """Prediction and result of a setting.

    Attributes
    ----------
    first, unharmed, attacked : float
        Training losses: before the first step, and over the last quarter of the steps
        without adversaries and with them.
    """

    setting: Setting
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


def predict(setting: Setting, more: Sequence[str] = ()) -> Forecast:
    """Return what ``safedshb plan`` says before a run, from the first model alone.

    Parameters
    ----------
    setting : Setting
    more : sequence of str
        Overrides of all runs.
    """
    case = Case(setting, attacked=True, seed=1)
    text = shlex.join([*case.overrides, *more])
    cfg, data = composed(text), federation(text)
    model = copy.deepcopy(untrained(text))
    shards = [[shard] for shard in data.shards]
    gradients = np.array([loss_gradient(model, s, cfg.weight_decay) for s in shards])
    gradient = gradients.mean(axis=0).astype(np.float64)
    length = float(np.linalg.norm(gradient))
    _move(model, gradient / length)
    moved = np.mean([loss_gradient(model, s, cfg.weight_decay) for s in shards], axis=0)
    curvature = float((moved - gradient) @ gradient / length) / _MOVE
    plan = cfg.privacy.plan
    return forecast(
        Planned(
            n=setting.n,
            f=setting.f,
            m=min(data.sizes),
            d=len(gradient),
            b=plan.batch_size,
            clip_norm=plan.clip_norm,
            steps=cfg.steps,
            delta=cfg.privacy.delta,
            sampling=plan.sampling,
            epsilon=None,
            noise_multiplier=setting.noise,
            heterogeneity=theory.heterogeneity(gradients)[1],
            momentum=setting.momentum,
            gradient=length,
            learning_rate=cfg.server_learning_rate,
            smoothness=max(0.0, curvature),
        )
    )


def _move(model: nn.Module, way: NDArray[np.float64]) -> None:
    """Move a model by a small step, in place."""
    trained = [p for p in model.parameters() if p.requires_grad]
    vector = nn.utils.parameters_to_vector(trained).detach()
    vector += _MOVE * torch.from_numpy(way).to(vector.dtype)
    nn.utils.vector_to_parameters(vector, trained)


def outcomes(runs: Mapping[Case, RunRecord], more: Sequence[str] = ()) -> list[Outcome]:
    """Return the outcome of each setting, averaged over seeds."""
    found = []
    for setting in dict.fromkeys(case.setting for case in runs):
        attacked, unharmed = (
            [r for c, r in runs.items() if (c.setting, c.attacked) == (setting, how)]
            for how in (True, False)
        )
        first = np.mean([run["evaluations"]["training_loss"][0] for run in attacked])
        found.append(
            Outcome(
                setting,
                predict(setting, more),
                float(first),
                float(late(unharmed, "training_loss").mean()),
                float(late(attacked, "training_loss").mean()),
            )
        )
    return sorted(found, key=lambda one: one.predicted.radius * one.predicted.swing)


def agreement(found: Sequence[Outcome]) -> str:
    """Say how often prediction and result agree."""
    tuned = [one for one in found if _tuned(one.setting)]
    tried = [one for one in found if not _tuned(one.setting)]
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


def _tuned(setting: Setting) -> bool:
    return setting.noise == TUNED and setting.alpha is None


def markdown(found: Sequence[Outcome]) -> str:
    """Return predictions beside results as a table."""
    heads = ["n", "f", "noise", "beta", "shares", "epsilon", "radius", "x swing"]
    heads += ["gradient", "loss: first", "no attack", "strongest", "withstands"]
    heads += ["predicted"]
    rows = []
    for one in found:
        it, plan = one.setting, one.predicted
        alike = "iid" if it.alpha is None else f"Dirichlet {it.alpha:g}"
        figures = (plan.epsilon, plan.radius, plan.radius * plan.swing)
        losses = (plan.spec.gradient or 0.0, one.first, one.unharmed, one.attacked)
        said = "yes" if plan.withstands else "no"
        rows.append(
            [str(it.n), str(it.f), f"{it.noise:g}", f"{it.momentum:g}", alike]
            + [f"{value:.3g}" for value in (*figures, *losses)]
            + ["yes" if one.withstood else "no"]
            + [said if one.agrees else f"**{said}**"]
        )
    return "\n".join([*table(heads, rows), "", agreement(found), ""])
