"""Search for gradients whose terms cancel, where rounding could break the bound.

The gradient of a weight is a sum over positions, sum_t g_t a_t, of output gradients g_t
and inputs a_t of a layer. Its rounding error is of the size of the terms, and its norm
may be far smaller: then a computed norm and a computed sum can disagree.
`optimise_candidate` moves weights and inputs to such points. `RoundingSlack` scores how
near a candidate is to one, because the sums alone give a search no gradient to climb
until it has found a violation.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from flwr_safedshb.audit.candidate import (
    Candidate,
    draw_candidate,
    float_entries,
    load_entries,
)
from flwr_safedshb.audit.target_model import Batch, TargetModel
from flwr_safedshb.privacy.clipping.gradients import Loss
from flwr_safedshb.privacy.losses import PerExampleLoss
from flwr_safedshb.stop_signal import reraise_stop

_STEPS = 15


def optimise_candidate(
    target: TargetModel,
    model: nn.Module,
    weights: list[torch.Tensor],
    rng: np.random.Generator,
) -> Candidate:
    """Return a candidate with an example whose gradient cancels.

    Weights and inputs are moved, in float64, until the gradient of one example nearly
    vanishes, and are then scaled up by powers of two. A model without second
    derivatives gets a random candidate.
    """
    candidate = draw_candidate(target, weights, rng)
    wide = copy.deepcopy(model).double().train()
    load_entries(wide, weights)
    inputs, targets = (part.clone() for part in target.draw(1, rng))
    if inputs.is_floating_point():
        inputs = inputs.double()
    try:
        moved = _descend(wide, target, (inputs, targets))
    except BaseException as error:  # a loss may raise anything
        reraise_stop(error)
        return candidate
    scales = 2.0 ** rng.integers(-2, 20, size=len(weights) + 1)
    dtype = weights[0].dtype
    scaled = [
        (entry * float(scale)).to(dtype)
        for entry, scale in zip(float_entries(wide), scales, strict=False)
    ]
    if moved.is_floating_point():
        moved = (moved * float(scales[-1])).to(dtype)
    count = len(candidate.batch[1])
    inputs, targets = (
        part.expand(count, *part.shape[1:]).clone() for part in (moved, targets)
    )
    return replace(candidate, weights=scaled, batch=(inputs, targets))


def _descend(model: nn.Module, target: TargetModel, example: Batch) -> torch.Tensor:
    """Shrink an example's gradient by moving the weights and the input; return it."""
    inputs, targets = example
    trained = [p for p in model.parameters() if p.requires_grad]
    moving = list(trained)
    if inputs.is_floating_point():
        inputs = nn.Parameter(inputs)
        moving.append(inputs)
    loss = PerExampleLoss(target.loss)
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
                if slope is not None:  # normalised, with decreasing steps
                    length = 0.3 * 0.8**step / (float(slope.norm()) + 1e-300)
                    part.sub_(slope, alpha=length)
    return inputs.detach()


class RoundingSlack:
    """Estimate the rounding error of one example's gradient.

    Parameters
    ----------
    model : nn.Module
    loss : callable
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self._model = model
        self._loss = PerExampleLoss(loss)
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._layers = [
            module
            for module in model.modules()
            if any(p.requires_grad for p in module.parameters(recurse=False))
        ]

    def measure(self, example: Batch, clip_norm: float) -> float:
        """Return the largest rounding error in units of max(norm, C); 0 if unknown."""
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        handles: list[RemovableHandle] = []

        def record(layer: nn.Module, given: object, output: object) -> None:
            inputs = given[0] if isinstance(given, tuple) and given else None
            if torch.is_tensor(inputs) and torch.is_tensor(output):
                seen.append((inputs.detach(), output))

        try:
            handles += [layer.register_forward_hook(record) for layer in self._layers]
            inputs, targets = (part.clone() for part in example)  # some work in place
            losses = self._loss(self._model(inputs), targets)
            outputs = [output for _, output in seen]
            found = torch.autograd.grad(
                losses.sum(), [*self._trained, *outputs], allow_unused=True
            )
        except BaseException as error:  # a loss may raise anything
            reraise_stop(error)
            return 0.0
        finally:
            for handle in handles:
                handle.remove()
        gradients, back = found[: len(self._trained)], found[len(self._trained) :]
        norm = math.hypot(*(_norm(g) for g in gradients if g is not None))
        terms = [
            _norm(g) * max(_norm(inputs), 1.0)
            for (inputs, _), g in zip(seen, back, strict=True)
            if g is not None
        ]
        rounding = max(terms, default=0.0) * torch.finfo(self._trained[0].dtype).eps
        slack = rounding / max(norm, clip_norm)
        return slack if math.isfinite(slack) else 0.0


def _norm(tensor: torch.Tensor) -> float:
    if not tensor.is_floating_point():
        return 1.0  # indices into a table
    return float(torch.linalg.vector_norm(tensor.detach().double()))
