"""A torch model as arrays, and as one vector of what is trained."""

import numpy as np
import torch
from torch import nn

from flwr_safedshb.exchange.model import ModelArrays


class Tied(nn.Module):
    """A model with a frozen layer, a buffer, and one parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.register_buffer("count", torch.tensor(4))
        self.last = nn.Linear(2, 3, bias=False)
        self.last.weight = self.first.weight


def test_a_vector_is_split_by_what_is_trained() -> None:
    model = Tied()
    names = list(model.state_dict())
    arrays = ModelArrays(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    vector = np.arange(sum(p.numel() for p in parameters), dtype=np.float32) + 1
    parts = dict(zip(names, arrays.split(vector), strict=True))
    assert [part.shape for part in parts.values()] == arrays.shapes
    assert all(part.dtype == np.float32 for part in parts.values())
    # The order of model.parameters(), in which gradients come.
    start = 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            expected = vector[start : start + parameter.numel()]
            assert np.array_equal(parts[name].reshape(-1), expected)
            start += parameter.numel()
    assert np.array_equal(parts["last.weight"], parts["first.weight"])
    for name in ("frozen.weight", "frozen.bias", "count"):
        assert not parts[name].any()


def test_all_arrays_are_loaded_in_the_models_own_types() -> None:
    model = Tied().double()
    entries = model.state_dict(keep_vars=True)
    sent = [
        np.full(tuple(e.shape), 2, e.detach().numpy().dtype) for e in entries.values()
    ]
    ModelArrays(model).load([*sent])
    assert all(bool((entry == 2).all()) for entry in entries.values())
    assert model.first.weight is entries["first.weight"]
    half = nn.Linear(2, 2).to(torch.bfloat16)  # which numpy does not have
    ModelArrays(half).load([np.ones((2, 2), np.float32), np.zeros(2, np.float32)])
    assert half.weight.dtype == torch.bfloat16
    assert half.weight.sum() == 4
