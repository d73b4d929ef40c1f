"""A torch model as arrays, and as one vector of what is trained."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from flwr_safedshb import trained_arrays
from flwr_safedshb.algorithm.model_arrays import load_weights, trained_parameters
from flwr_safedshb.algorithm.wire import Template, split_vector


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


def test_only_what_is_trained_crosses_the_wire_and_only_once() -> None:
    model = Tied()
    sent = trained_arrays(model)
    assert list(sent) == ["first.weight", "first.bias"]
    state = model.state_dict()
    for name, array in sent.items():
        assert np.array_equal(array.numpy(), state[name].numpy())
    result = model.load_state_dict(sent.to_torch_state_dict(), strict=False)
    assert not result.unexpected_keys


def test_a_vector_is_split_by_what_is_trained() -> None:
    """In the order of model.parameters(), in which gradients come."""
    weight, bias = split_vector(
        np.arange(9, dtype=np.float32), Template.of(trained_arrays(Tied())).shapes
    )
    assert weight.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert bias.tolist() == [6, 7, 8]
    assert weight.dtype == bias.dtype == np.float32


def test_arrays_are_loaded_in_the_models_own_types() -> None:
    model = Tied().double()
    weights = trained_parameters(model).values()
    load_weights(weights, [np.full((3, 2), 2, np.float32), np.full(3, 3.0)])
    assert model.first.weight.tolist() == [[2.0, 2.0]] * 3
    assert model.last.weight is model.first.weight
    assert model.first.bias.tolist() == [3.0] * 3
    half = nn.Linear(2, 2).to(torch.bfloat16)  # which numpy does not have
    assert trained_arrays(half)["weight"].numpy().dtype == np.float32
    sent = [np.ones((2, 2), np.float32), np.zeros(2, np.float32)]
    load_weights(trained_parameters(half).values(), sent)
    assert half.weight.dtype == torch.bfloat16
    assert half.weight.sum() == 4


def test_a_message_may_have_its_arrays_in_any_order() -> None:
    sent = trained_arrays(Tied())
    template = Template.of(sent)
    turned = ArrayRecord({name: sent[name] for name in reversed(list(sent))})
    assert list(turned) != list(sent)
    numbered = ArrayRecord([a.numpy() for a in sent.values()])
    for record, names in ((turned, tuple(sent)), (numbered, ("0", "1"))):
        found, arrays = template.decode(record)
        assert found == names
        assert [array.shape for array in arrays] == [(3, 2), (3,)]


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (
            {**Tied().state_dict()},
            "has count, frozen.weight, frozen.bias and 1 more, and",
        ),
        (nn.Linear(2, 3).state_dict(), "has weight, bias and lacks first.weight, fir"),
        ({"first.weight": torch.zeros(3, 2)}, "lacks first.bias, and"),
    ],
)
def test_other_names_are_refused_with_the_remedy(
    sent: dict[str, torch.Tensor], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem) as raised:
        Template.of(trained_arrays(Tied())).decode(ArrayRecord(sent))
    assert "trained_arrays(model)" in str(raised.value)
