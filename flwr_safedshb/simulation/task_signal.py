"""Measure on public or made-up data what decides whether a training withstands.

Private data must not be measured so: neither number has noise in it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from flwr_safedshb.algorithm.model_arrays import load_weights, trained_parameters
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients

# Of the way to the good model, where the gradient is taken.
SHARE = 0.1
# Keeps the optimum of separable classes at a finite distance.
WEIGHT_DECAY = 1e-3
_STEPS = 100


@dataclass(frozen=True)
class TaskSignal:
    """What `theory.predict_withstanding` needs to know of a task.

    Attributes
    ----------
    signal : float
        How much of the mean clipped gradient points the way to a good model, a tenth of
        that way from the first.
    distance : float
        To the good model.
    way : (d,) array
        From the first model to it.
    """

    signal: float
    distance: float
    way: NDArray[np.float64]


def measure_signal(
    model: nn.Module,
    loss: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    clip_norm: float,
) -> TaskSignal:
    """Return signal and way of a task at its first model, which stays as it is.

    Parameters
    ----------
    model : nn.Module
    loss : nn.Module
        The mean over a batch, as a client is given it.
    inputs, targets : Tensor
        Of public or made-up examples.
    clip_norm : float
        C.
    """
    model = copy.deepcopy(model).eval()
    trained = [*trained_parameters(model).values()]
    first = nn.utils.parameters_to_vector(trained).detach().double().numpy()
    way = _find_way(model, loss, inputs, targets)
    distance = float(np.linalg.norm(way))
    if distance == 0.0:
        raise ValueError("the first model is the best already: nothing to learn")
    shapes = [tuple(weight.shape) for weight in trained]
    ends = np.cumsum([weight.numel() for weight in trained])[:-1]
    parts = np.split((first + SHARE * way).astype(np.float32), ends)
    load_weights(
        trained, [part.reshape(s) for part, s in zip(parts, shapes, strict=True)]
    )
    clipped = ClippedGradients(model, loss, clip_norm)
    gradient = clipped.flat_sum(inputs, targets).double().numpy() / len(targets)
    return TaskSignal(float(-gradient @ way) / distance, distance, way)


def _find_way(
    model: nn.Module, loss: nn.Module, inputs: torch.Tensor, targets: torch.Tensor
) -> NDArray[np.float64]:
    """Return where L-BFGS ends, (d,), as seen from a model."""
    model = copy.deepcopy(model)
    trained = [*trained_parameters(model).values()]
    first = nn.utils.parameters_to_vector(trained).detach().clone()
    search = torch.optim.LBFGS(trained, max_iter=_STEPS, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        search.zero_grad()
        total: torch.Tensor = loss(model(inputs), targets)
        moved = nn.utils.parameters_to_vector(trained) - first
        total = total + WEIGHT_DECAY / 2 * moved.square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    search.step(closure)  # type: ignore[no-untyped-call]
    found = nn.utils.parameters_to_vector(trained).detach() - first
    return found.double().numpy()
