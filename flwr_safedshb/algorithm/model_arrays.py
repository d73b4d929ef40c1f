"""What of a torch model crosses the wire: the parameters that are trained, by name.

Whatever else a model has, a frozen base or the averages of a batch norm, is each side's
own, and must be the same on all of them.
"""

from __future__ import annotations

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import nn

from flwr_safedshb.algorithm.wire import encode_array

# Types of values that torch and numpy hold alike.
SHARED = frozenset({torch.float32, torch.float64})


def trained_arrays(model: nn.Module) -> ArrayRecord:
    """Return the parameters that are trained, by name: what a run starts from.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    >>> _ = model[0].requires_grad_(False)
    >>> list(trained_arrays(model))
    ['1.weight', '1.bias']

    What a run returns goes back by ``model.load_state_dict(
    result.arrays.to_torch_state_dict(), strict=False)``.
    """
    return ArrayRecord({n: encode_array(_numpy(p)) for n, p in trained(model).items()})


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters with ``requires_grad`` by their names."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _numpy(parameter: nn.Parameter) -> NDArray[np.generic]:
    values = parameter.detach().cpu()
    # numpy has no bfloat16.
    shared = values if values.dtype in SHARED else values.float()
    return np.asarray(shared.numpy())
