import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.clipping.layers import LayerChain
from flwr_safedshb.privacy.clipping.linear import LinearChain

shared = nn.Linear(4, 4)
tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
tied[1].weight = tied[0].weight


class Subclass(nn.Linear):
    """Still a linear layer."""


class Doubled(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return 2.0 * super().forward(inputs)


@pytest.mark.parametrize(
    ("model", "fits"),
    [
        (nn.Linear(3, 2), True),
        (Subclass(3, 2), True),
        (nn.Sequential(nn.Flatten(), nn.Linear(3, 2), nn.Tanh()), True),
        (nn.Sequential(nn.Sequential(nn.Linear(3, 2)), nn.Dropout()), True),
        (Doubled(3, 2), False),
        (nn.Sequential(nn.Linear(3, 2), nn.ReLU(inplace=True)), False),
        (nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)), False),
        (nn.Sequential(nn.Conv2d(1, 1, 2)), False),
        (nn.Sequential(shared, nn.Tanh(), shared), False),
        (nn.Sequential(nn.Sequential(shared), nn.Sequential(shared)), False),
        (tied, False),
        (nn.ModuleList([nn.Linear(3, 2)]), False),
    ],
)
def test_covers_plain_chains_only(model: nn.Module, fits: bool) -> None:
    assert LinearChain.fits(model) == fits


@pytest.mark.parametrize("frozen", [None, "0.weight", "0.bias", "2.weight"])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_materialised_path(frozen: str | None, bias: bool) -> None:
    if not bias and frozen == "0.bias":
        return
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7, bias=bias), nn.Tanh(), nn.Linear(7, 3))
    if frozen is not None:
        model.get_parameter(frozen).requires_grad_(False)
    inputs, targets = 3 * torch.randn(11, 5), torch.randint(3, (11,))
    closed = ClippedGradients(model, nn.CrossEntropyLoss(), 0.7)
    plain = ClippedGradients(model, nn.CrossEntropyLoss(), 0.7)
    assert closed._forms
    plain._forms = []
    for ours, theirs in zip(
        closed(inputs, targets), plain(inputs, targets), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_positions_fall_back_to_the_hooks() -> None:
    """A linear layer over sequences has more than one product for each example."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Flatten(), nn.Linear(15, 2))
    inputs, targets = torch.randn(6, 5, 4), torch.randint(2, (6,))
    sums = ClippedGradients(model, nn.CrossEntropyLoss(), 0.1)
    result = sums(inputs, targets)
    assert sums._forms == [LayerChain]
    total = [torch.zeros_like(p) for p in model.parameters()]
    for x, y in zip(inputs, targets, strict=True):
        one = copy.deepcopy(model)
        value = cross_entropy(one(x[None]), y[None])
        gradient = torch.autograd.grad(value, list(one.parameters()))
        norm = torch.cat([g.flatten() for g in gradient]).norm()
        for mine, g in zip(total, gradient, strict=True):
            mine += g * min(1.0, 0.1 / float(norm))
    for ours, theirs in zip(result, total, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_an_infinite_example_contributes_nothing() -> None:
    model = nn.Linear(3, 2)
    inputs, targets = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    clean = ClippedGradients(model, nn.CrossEntropyLoss(), 1.0)(inputs, targets)
    inputs = torch.cat([inputs, torch.full((1, 3), torch.inf), torch.ones(1, 3)])
    inputs[5, 1] = torch.nan
    targets = torch.cat([targets, torch.tensor([1, 0])])
    spoilt = ClippedGradients(model, nn.CrossEntropyLoss(), 1.0)(inputs, targets)
    for one, other in zip(clean, spoilt, strict=True):
        torch.testing.assert_close(one, other)
