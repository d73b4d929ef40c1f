"""Convert the trained parameters of a torch model to and from arrays.

Only these are sent. Frozen parameters and buffers are never sent and must be equal on
the server and on all clients.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import nn

from flwr_safedshb.algorithm.wire import encode_array

# Types that torch and numpy share.
SHARED = frozenset({torch.float32, torch.float64})


def trained_arrays(model: nn.Module) -> ArrayRecord:
    """Return the trained parameters by name, the initial arrays of a run.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    >>> _ = model[0].requires_grad_(False)
    >>> list(trained_arrays(model))
    ['1.weight', '1.bias']

    Load the result of a run by ``model.load_state_dict(
    result.arrays.to_torch_state_dict(), strict=False)``.
    """
    return ArrayRecord(
        {n: encode_array(_to_numpy(p)) for n, p in trained_parameters(model).items()}
    )


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters with ``requires_grad`` by their names."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def load_weights(
    trained: Iterable[nn.Parameter], arrays: Iterable[NDArray[np.generic]]
) -> None:
    """Copy arrays into the parameters of a model, in order."""
    for parameter, array in zip(trained, arrays, strict=True):
        tensor = parameter.detach()
        if tensor.device.type == "cpu" and tensor.dtype in SHARED:
            np.copyto(tensor.numpy(), array, casting="same_kind")
        else:
            tensor.copy_(torch.from_numpy(array.copy()))


def _to_numpy(parameter: nn.Parameter) -> NDArray[np.generic]:
    values = parameter.detach().cpu()
    # numpy has no bfloat16.
    shared = values if values.dtype in SHARED else values.float()
    return np.asarray(shared.numpy())
