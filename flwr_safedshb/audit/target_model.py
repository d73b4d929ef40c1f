"""A model, a loss and a source of examples for the sensitivity search to attack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from flwr_safedshb.privacy.clipping.gradients import Loss
from flwr_safedshb.privacy.plan import Clipping

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and targets, examples first
DrawExamples = Callable[[int, np.random.Generator], Batch]


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each example, (k,) from (k, classes) and (k,)."""
    return functional.cross_entropy(outputs, targets, reduction="none")


@dataclass(frozen=True)
class TargetModel:
    """A model under attack.

    Attributes
    ----------
    name : str
    make : callable () -> nn.Module
        Makes a new model; its weights may depend on torch's random state.
    draw : callable (k, rng) -> (inputs, targets)
        Draws k ordinary examples; the search then makes them hostile.
    loss : callable (outputs, targets) -> Tensor
    dtypes : tuple of torch.dtype
        Types of the weights to try.
    clipping : str
        `PrivacyPlan.clipping`.
    optimise : bool
        Whether the search may follow gradients, which takes second derivatives.
    max_batches : int
        The most batches to measure at once.
    per_owner : int
        K: with more than 1 the unit is a person, who has K places in a batch.
    must_refuse : bool
        Whether `ClippedGradients` must refuse it, as it must a model that keeps values
        of examples.
    """

    name: str
    make: Callable[[], nn.Module]
    draw: DrawExamples
    loss: Loss = cross_entropy
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    clipping: Clipping = "per-example"
    optimise: bool = True
    max_batches: int = 72
    per_owner: int = 1
    must_refuse: bool = False


def floats(*shape: int, classes: int) -> DrawExamples:
    """Return a `TargetModel.draw` of Gaussian inputs and random classes."""

    def draw(count: int, rng: np.random.Generator) -> Batch:
        inputs = torch.from_numpy(rng.standard_normal((count, *shape)))
        return inputs.float(), torch.from_numpy(rng.integers(classes, size=count))

    return draw


def tokens(length: int, vocabulary: int, classes: int) -> DrawExamples:
    """Return a `TargetModel.draw` of random token sequences and random classes."""

    def draw(count: int, rng: np.random.Generator) -> Batch:
        inputs = torch.from_numpy(rng.integers(vocabulary, size=(count, length)))
        return inputs, torch.from_numpy(rng.integers(classes, size=count))

    return draw


class ComposedModel(nn.Module):
    """Named layers, and the function that applies them.

    Parameters
    ----------
    compute : callable (model, inputs) -> outputs
    **layers : nn.Module
        Become attributes of the model, in this order.
    """

    def __init__(
        self,
        compute: Callable[[Any, torch.Tensor], torch.Tensor],
        **layers: nn.Module,
    ) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.compute = compute

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs, one row an example."""
        outputs: torch.Tensor = self.compute(self, inputs)
        return outputs


class Between(nn.Module):
    """Two linear layers of width 6, with a function and maybe dropout between them.

    Parameters
    ----------
    function : callable (hidden) -> Tensor
    in_evaluation : bool
        Whether evaluation mode applies the function, too.
    dropout : float
    """

    def __init__(
        self,
        function: Callable[[torch.Tensor], torch.Tensor],
        in_evaluation: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.function, self.in_evaluation = function, in_evaluation
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the scores of three classes."""
        hidden = self.first(inputs)
        if self.training or self.in_evaluation:
            hidden = self.function(hidden)
        outputs: torch.Tensor = self.last(self.dropout(hidden))
        return outputs
