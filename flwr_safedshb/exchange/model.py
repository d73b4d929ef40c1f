"""A torch model as the arrays that cross the wire, and as one flat vector.

Only the parameters that are trained cross it, by name. Whatever else a model has, a
frozen base or the averages of a batch norm, is each side's own, and must be the same on
all of them.

A client computes with one vector, (d,), of all the parameters that it trains, in the
order of ``model.parameters()``. This is the one place where the two meet.
"""

from __future__ import annotations

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import nn

from flwr_safedshb.exchange.arrays import Arrays, encoded
from flwr_safedshb.flower.compat import refilled

# Types of values that torch and numpy hold alike.
_SHARED = frozenset({torch.float32, torch.float64})
# Names that an error quotes, and characters of each.
_TOLD, _LONG = 3, 60


def trained_arrays(model: nn.Module) -> ArrayRecord:
    """Return the parameters that are trained, by name: what a run starts from.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    >>> _ = model[0].requires_grad_(False)
    >>> list(trained_arrays(model))
    ['1.weight', '1.bias']

    What a run returns goes back by ``model.load_state_dict(
    result.arrays.to_torch_state_dict(), strict=False)``.
    """
    return ArrayRecord({n: encoded(_numpy(p)) for n, p in _trained(model).items()})


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _numpy(parameter: nn.Parameter) -> NDArray[np.generic]:
    values = parameter.detach().cpu()
    # numpy has no bfloat16.
    shared = values if values.dtype in _SHARED else values.float()
    return np.asarray(shared.numpy())


class ModelArrays:
    """The trained arrays of a model.

    Parameters
    ----------
    model : nn.Module

    Attributes
    ----------
    names : tuple of str
        In the order of ``model.parameters()``.
    shapes : list of tuples of int
    """

    def __init__(self, model: nn.Module) -> None:
        trained = _trained(model)
        self._parameters = list(trained.values())
        self.names = tuple(trained)
        self._numbers = tuple(map(str, range(len(trained))))
        self.shapes = [tuple(p.shape) for p in self._parameters]
        self._ends = np.cumsum([p.numel() for p in self._parameters])[:-1]

    def ordered(self, record: ArrayRecord) -> ArrayRecord:
        """Return a record with its arrays in the model's order.

        Raises
        ------
        ValueError
            If it has other names, and does not number its arrays either.
        """
        for names in (self.names, self._numbers):
            if tuple(record) == names:
                return record
            if record.keys() == {*names}:
                return refilled(record, {name: record[name] for name in names})
        idle = [name for name in record if name not in self.names]
        missing = [name for name in self.names if name not in record]
        problems = [
            f"{word} {_few(names)}"
            for word, names in (("has", idle), ("lacks", missing))
            if names
        ]
        raise ValueError(
            f"the message {' and '.join(problems)}, and the arrays of a message must "
            "be those that the client trains: start the run from trained_arrays(model)"
        )

    def load(self, arrays: Arrays) -> None:
        """Give the model the weights that were sent."""
        for parameter, array in zip(self._parameters, arrays, strict=True):
            held = parameter.detach()
            if held.device.type == "cpu" and held.dtype in _SHARED:
                np.copyto(held.numpy(), array, casting="same_kind")
            else:
                held.copy_(torch.from_numpy(array.copy()))

    def split(self, vector: NDArray[np.float32]) -> Arrays:
        """Return a vector, (d,), as arrays."""
        parts = np.split(vector, self._ends)
        return [p.reshape(s) for p, s in zip(parts, self.shapes, strict=True)]


def _few(names: list[str]) -> str:
    more = len(names) - _TOLD
    told = ", ".join(name[:_LONG] for name in names[:_TOLD])
    return told + (f" and {more} more" if more > 0 else "")
