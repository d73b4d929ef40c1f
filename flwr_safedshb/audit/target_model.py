"""What is attacked: a model and a loss, and examples that they could be given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from flwr_safedshb.privacy.clipping.gradients import Loss
from flwr_safedshb.privacy.plan import Clipping

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and targets, examples first


@dataclass(frozen=True)
class Subject:
    """A model under attack.

    Attributes
    ----------
    name : str
    make : callable () -> nn.Module
        A new model; its weights may depend on torch's random state.
    loss : callable (outputs, targets) -> Tensor
    draw : callable (k, rng) -> (inputs, targets)
        k examples as they could be in a dataset; they are then made hostile.
    dtypes : tuple of torch.dtype
        Types of the weights that are tried.
    clipping : str
        The plan's word.
    driven : bool
        Whether an optimiser may drive candidates, which takes second derivatives.
    together : int
        The most batches that are measured at once.
    must_refuse : bool
        Whether the only right answer is a refusal, as for a model that keeps values of
        examples.
    """

    name: str
    make: Callable[[], nn.Module]
    loss: Loss
    draw: Callable[[int, np.random.Generator], Batch]
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    clipping: Clipping = "per-example"
    driven: bool = True
    together: int = 72
    must_refuse: bool = False


def floats(*shape: int, classes: int) -> Callable[[int, np.random.Generator], Batch]:
    """Return a `Subject.draw` of Gaussian inputs and classes."""

    def draw(count: int, rng: np.random.Generator) -> Batch:
        inputs = torch.from_numpy(rng.standard_normal((count, *shape)))
        return inputs.float(), torch.from_numpy(rng.integers(classes, size=count))

    return draw


def tokens(
    length: int, words: int, classes: int
) -> Callable[[int, np.random.Generator], Batch]:
    """Return a `Subject.draw` of rows of whole numbers and classes."""

    def draw(count: int, rng: np.random.Generator) -> Batch:
        inputs = torch.from_numpy(rng.integers(words, size=(count, length)))
        return inputs, torch.from_numpy(rng.integers(classes, size=count))

    return draw
