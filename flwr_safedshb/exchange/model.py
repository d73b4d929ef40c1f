"""A torch model as the arrays that cross the wire, and as one flat vector.

A client computes with one vector, (d,), of all the parameters that it trains, in the
order of ``model.parameters()``. The server knows the arrays of the model's
``state_dict``. This is the one place where the two meet.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from flwr_safedshb.exchange.arrays import Arrays

# Types of values that torch and numpy hold alike.
_SHARED = frozenset({torch.float32, torch.float64, torch.int64, torch.bool})


class ModelArrays:
    """The arrays of a model's ``state_dict``, in its order.

    Parameters
    ----------
    model : nn.Module

    Attributes
    ----------
    shapes : list of tuples of int
        Of the arrays.
    """

    def __init__(self, model: nn.Module) -> None:
        self._entries = list(model.state_dict(keep_vars=True).values())
        self.shapes = [tuple(entry.shape) for entry in self._entries]
        parts: dict[int, slice] = {}
        stop = 0
        for parameter in model.parameters():
            if parameter.requires_grad:
                start, stop = stop, stop + parameter.numel()
                parts[id(parameter)] = slice(start, stop)
        # Where each array is in the vector; None where nothing is trained.
        self._parts = [parts.get(id(entry)) for entry in self._entries]

    def load(self, arrays: Arrays) -> None:
        """Give the model the weights that were sent."""
        for entry, array in zip(self._entries, arrays, strict=True):
            held = entry.detach()
            if held.device.type == "cpu" and held.dtype in _SHARED:
                np.copyto(held.numpy(), array, casting="same_kind")
            else:
                held.copy_(torch.from_numpy(array.copy()))

    def split(self, vector: NDArray[np.float32]) -> Arrays:
        """Return a vector, (d,), as arrays, with zeros where nothing is trained."""
        return [
            np.zeros(shape, np.float32) if part is None else vector[part].reshape(shape)
            for shape, part in zip(self.shapes, self._parts, strict=True)
        ]
