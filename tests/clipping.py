"""The definition of a clipped sum, taken literally, and models to try it on."""

import copy
import functools
import math

import torch
from torch import nn
from torch.nn import functional

from flwr_safedshb.privacy.clipping.backward import BatchedBackward
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients, Loss

cross_entropy = functools.partial(functional.cross_entropy, reduction="none")


def literal(
    model: nn.Module, loss: Loss, inputs: torch.Tensor, targets: torch.Tensor, c: float
) -> list[torch.Tensor]:
    """Clip(g; C) = g min(1, C/||g||) summed, one example at a time, in float64."""
    model = copy.deepcopy(model).double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in parameters]
    for i in range(len(targets)):
        value = loss(model(inputs[i : i + 1]), targets[i : i + 1]).sum()
        gradient = torch.autograd.grad(value, parameters, allow_unused=True)
        flat = torch.cat([g.flatten() for g in gradient if g is not None])
        norm = float(flat.norm())
        if not math.isfinite(norm):
            continue
        for mine, g in zip(total, gradient, strict=True):
            if g is not None:
                mine += g * (min(1.0, c / norm) if norm > 0 else 1.0)
    return total


def assert_close(
    mine: list[torch.Tensor], theirs: list[torch.Tensor], tolerance: float = 1e-5
) -> None:
    assert [m.shape for m in mine] == [t.shape for t in theirs]
    for m, t in zip(mine, theirs, strict=True):
        assert float((m - t).abs().max()) <= tolerance


def way_of(sums: ClippedGradients) -> str:
    """Name the way that the examples of the last new shape go through the model."""
    *_, backward = sums._backwards.values()
    if not isinstance(backward, BatchedBackward):
        return "alone"
    return "plain" if backward._plain else "vmap"


class OwnForward(nn.Module):
    """A model with a forward of its own around another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(inputs)
        return outputs
