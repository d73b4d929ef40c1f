"""A client's model, made ready once for many steps."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from flwr_safedshb.client.momentum import Vector
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients, Loss
from flwr_safedshb.privacy.plan import Clipping

# Types of values that torch and numpy hold alike.
_SHARED = frozenset({torch.float32, torch.float64, torch.int64, torch.bool})


class Prepared:
    """A model with its hooks, and where its parameters are among the arrays sent."""

    def __init__(self, gradients: ClippedGradients) -> None:
        self.gradients = gradients
        model = gradients.model
        self._entries = list(model.state_dict(keep_vars=True).values())
        self.shapes = [tuple(entry.shape) for entry in self._entries]
        places: dict[int, slice] = {}
        stop = 0
        for parameter in gradients.trained:
            start, stop = stop, stop + parameter.numel()
            places[id(parameter)] = slice(start, stop)
        self._places = [places.get(id(entry)) for entry in self._entries]

    def load(self, parameters: list[NDArray[np.generic]]) -> None:
        """Give the model the weights that were sent."""
        for entry, array in zip(self._entries, parameters, strict=True):
            held = entry.detach()
            if held.device.type == "cpu" and held.dtype in _SHARED:
                np.copyto(held.numpy(), array, casting="same_kind")
            else:
                held.copy_(torch.from_numpy(array.copy()))

    def flatten(self, gradient: Vector) -> NDArray[np.float64]:
        """Return the gradient of what is trained with zeros for what is not."""
        return np.concatenate(
            [
                np.zeros(math.prod(shape)) if place is None else gradient[place]
                for shape, place in zip(self.shapes, self._places, strict=True)
            ],
            dtype=np.float64,
        )

    def split(self, vector: Vector) -> list[NDArray[np.generic]]:
        """Return a vector, (d,), as the arrays of the model."""
        layers: list[NDArray[np.generic]] = []
        start = 0
        for shape in self.shapes:
            stop = start + math.prod(shape)
            layers.append(vector[start:stop].reshape(shape))
            start = stop
        return layers


@lru_cache(maxsize=4)
def prepare(
    model: nn.Module, loss: Loss, clip_norm: float, clipping: Clipping
) -> Prepared:
    """Check and hook a model once: that costs more than a step."""
    return Prepared(ClippedGradients(model, loss, clip_norm, clipping))
