"""Candidates that an optimiser drives to where an example's gradient cancels.

A sum whose terms are huge and whose value is nothing is where a norm and a sum may
disagree. So weights and inputs are moved, in float64, until the gradient of one example
nearly vanishes, and are then blown up by powers of two.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from flwr_safedshb.audit.candidate import Trial, drawn, entries
from flwr_safedshb.audit.target_model import Batch, Subject
from flwr_safedshb.privacy.losses import PerExampleLoss
from flwr_safedshb.stop_signal import reraise_stop

_STEPS = 15


def cancelled(
    subject: Subject,
    model: nn.Module,
    weights: list[torch.Tensor],
    rng: np.random.Generator,
) -> Trial:
    """Return candidates with an example whose gradient cancels.

    Where the model has no second derivatives they are random ones.
    """
    trial = drawn(subject, weights, rng)
    wide = copy.deepcopy(model).double().train()
    with torch.no_grad():
        for entry, given in zip(entries(wide), weights, strict=True):
            entry.copy_(given)
    inputs, targets = (part.clone() for part in subject.draw(1, rng))
    if inputs.is_floating_point():
        inputs = inputs.double()
    try:
        moved = _descended(wide, subject, (inputs, targets))
    except BaseException as error:  # a loss may raise anything
        reraise_stop(error)
        return trial
    scales = 2.0 ** rng.integers(-2, 20, size=len(weights) + 1)
    dtype = weights[0].dtype
    chosen = [
        (entry * float(scale)).to(dtype)
        for entry, scale in zip(entries(wide), scales, strict=False)
    ]
    if moved.is_floating_point():
        moved = (moved * float(scales[-1])).to(dtype)
    copies = len(trial.batch[1])
    batch = (
        moved.expand(copies, *moved.shape[1:]).clone(),
        targets.expand(copies, *targets.shape[1:]).clone(),
    )
    return replace(trial, weights=chosen, batch=batch)


def _descended(model: nn.Module, subject: Subject, batch: Batch) -> torch.Tensor:
    """Move the model's weights and the input; return the input."""
    inputs, targets = batch
    trained = [p for p in model.parameters() if p.requires_grad]
    moving = list(trained)
    if inputs.is_floating_point():
        inputs = nn.Parameter(inputs)
        moving.append(inputs)
    loss = PerExampleLoss(subject.loss)
    for step in range(_STEPS):
        value = loss(model(inputs), targets).sum()
        gradients = torch.autograd.grad(
            value, trained, create_graph=True, allow_unused=True
        )
        square = torch.stack(
            [g.square().sum() for g in gradients if g is not None]
        ).sum()
        slopes = torch.autograd.grad(square, moving, allow_unused=True)
        with torch.no_grad():
            for part, slope in zip(moving, slopes, strict=True):
                if slope is not None:  # by its direction, ever shorter
                    length = 0.3 * 0.8**step / (float(slope.norm()) + 1e-300)
                    part.sub_(slope, alpha=length)
    return inputs.detach()
