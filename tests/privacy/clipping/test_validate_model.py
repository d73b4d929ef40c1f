"""Models and losses that are refused, and examples that cannot meet each other."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from flwr_safedshb.privacy.clipping.gradients import (
    ClippedGradients,
    Loss,
    UnsupportedModelError,
    check_model,
)
from flwr_safedshb.privacy.losses import PerExampleLoss
from tests.clipping import OwnForward, cross_entropy, way_of

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


def batch(size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 6), torch.randint(3, (size,))


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(6),
        nn.BatchNorm1d(6, affine=False),
        nn.BatchNorm1d(6, affine=False, track_running_stats=False),
        nn.BatchNorm1d(6, track_running_stats=False).eval(),
    ],
)
def test_batch_norm_is_refused_with_its_remedy(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(6, 6), layer, nn.Linear(6, 3))
    with pytest.raises(UnsupportedModelError, match="GroupNorm") as caught:
        check_model(model)
    assert "ModuleValidator.fix" in str(caught.value)
    with pytest.raises(UnsupportedModelError):
        ClippedGradients(model, cross_entropy, 1.0)


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2).requires_grad_(False),
        nn.Linear(2, 2, dtype=torch.complex64),
        nn.Embedding(3, 2, max_norm=1.0),
        nn.Embedding(3, 2, scale_grad_by_freq=True),
    ],
)
def test_other_models_without_bounded_examples_are_refused(model: nn.Module) -> None:
    with pytest.raises(UnsupportedModelError):
        check_model(model)


class Made(nn.Module):
    """A forward of a function around one layer."""

    def __init__(
        self, function: Callable[[nn.Linear, torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.head, self.function = nn.Linear(6, 3), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.head, x)


def overwritten(head: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = head(hidden := x.clone())
    hidden.mul_(2.0)
    return y.tanh() + hidden.sum(dim=1, keepdim=True)


def mixing_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets) * outputs.abs().sum()


MIXING: dict[str, tuple[nn.Module, Loss]] = {
    "centred": (Made(lambda head, x: head(x - x.mean(dim=0))), cross_entropy),
    "by their number": (Made(lambda head, x: head(x * len(x))), cross_entropy),
    "functional batch norm": (
        Made(lambda head, x: functional.batch_norm(head(x), None, None, training=True)),
        cross_entropy,
    ),
    "mixup": (Made(lambda head, x: head(0.7 * x + 0.3 * x.roll(1, 0))), cross_entropy),
    "loss": (nn.Linear(6, 3), mixing_loss),
}


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("weights", ["random", "zero", "nan"])
@pytest.mark.parametrize("case", ["plain", "one", "nan"])
def test_examples_that_mix_are_found_whatever_the_batch_and_the_weights(
    name: str, dropout: bool, weights: str, case: str
) -> None:
    inner, loss = MIXING[name]
    model = nn.Sequential(inner, nn.Dropout(0.5)) if dropout else inner
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) if weights == "random" else 0.0 * p)
            if weights == "nan":
                p.fill_(math.nan)
    inputs, targets = batch(1 if case == "one" else 5)
    if case == "nan":
        inputs[:] = math.nan
    # Another loss of the same name has been used before.
    ClippedGradients(OwnForward(nn.Linear(6, 3)), cross_entropy, 1.0)(inputs, targets)
    with pytest.raises(UnsupportedModelError):
        ClippedGradients(model, loss, 1.0)(inputs, targets)


def hidden(outputs: torch.Tensor) -> torch.Tensor:
    """Mix examples, but only where no made-up example of an honest check comes."""
    return outputs + torch.where(outputs.abs() > 1e6, outputs.sum(dim=0), 0.0)


@pytest.mark.parametrize("where", ["model", "loss", "model and dropout"])
def test_nothing_mixes_where_only_a_servers_weights_lead(where: str) -> None:
    if where == "loss":
        model: nn.Module = nn.Linear(6, 3)
        loss: Loss = lambda out, y: cross_entropy(hidden(out) * 1e-6, y)  # noqa: E731
    else:
        model, loss = Made(lambda head, x: hidden(head(x)) * 1e-6), cross_entropy
        if "dropout" in where:
            model = nn.Sequential(nn.Dropout(1e-9), model)
    clipped = ClippedGradients(model, loss, 1.0)
    inputs, targets = batch()
    clipped(inputs, targets)  # accepted: it mixes nothing there
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 1e7)
    rest = torch.ones(6, dtype=torch.bool)
    rest[0] = False
    others = clipped.flat_sum(inputs, targets, rest)
    inputs[0] = torch.randn(6) * 1e3
    assert torch.equal(clipped.flat_sum(inputs, targets, rest), others)


class Shifted(nn.Sequential):
    """Shifts outputs by their mean over the batch, which a softmax does not see."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = super().__call__(x)
        return outputs - outputs.mean()


class Shifting(nn.Linear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = super().__call__(x)
        return outputs - outputs.mean()


@pytest.mark.parametrize(
    "model", [Shifted(nn.Linear(6, 3)), nn.Sequential(Shifting(6, 3))]
)
def test_a_class_that_inherits_a_known_forward_is_not_known(model: nn.Module) -> None:
    clipped = ClippedGradients(model, cross_entropy, 1.0)
    inputs, targets = batch()
    rest = torch.arange(6) > 0
    others = clipped.flat_sum(inputs, targets, rest)
    inputs[0] = 1e6
    assert torch.equal(clipped.flat_sum(inputs, targets, rest), others)


class OwnConvolution(nn.Conv1d):
    def _conv_forward(self, inputs: Any, *more: Any) -> torch.Tensor:
        found: torch.Tensor = super()._conv_forward(inputs, *more)
        return found - found.mean(dim=0)


@pytest.mark.parametrize("where", ["in its class", "on the layer"])
def test_a_layer_with_a_step_of_its_own_has_no_formula(where: str) -> None:
    layer = OwnConvolution(2, 3, 2) if where == "in its class" else nn.Conv1d(2, 3, 2)
    if where == "on the layer":
        own = layer._conv_forward
        layer._conv_forward = lambda *given: own(*given) * 2  # type: ignore[method-assign]
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(9, 3))
    clipped = ClippedGradients(model, cross_entropy, 1.0)
    inputs, targets = torch.randn(5, 2, 4), torch.randint(3, (5,))
    try:
        clipped.prepare(inputs, targets)
    except UnsupportedModelError:
        return
    assert way_of(clipped) != "plain"
    expected = clipped.flat_sum(inputs, targets, torch.arange(5) != 2)
    inputs[2] *= 1e3
    found = clipped.flat_sum(inputs, targets, torch.arange(5) != 2)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


def test_one_example_ends_no_step_under_anomaly_detection() -> None:
    model = OwnForward(nn.Linear(6, 3))
    clipped = ClippedGradients(model, lambda o, y: o.sum(1).sqrt(), 1.0)
    inputs, targets = batch()
    expected = clipped.flat_sum(inputs, targets)
    with torch.autograd.set_detect_anomaly(True):
        found = clipped.flat_sum(inputs, targets)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


def test_a_class_that_only_builds_a_model_is_as_fast_as_what_it_builds() -> None:
    class Built(nn.Sequential):
        def __init__(self, width: int) -> None:
            super().__init__(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))

    clipped = ClippedGradients(Built(4), cross_entropy, 1.0)
    clipped.prepare(*batch())
    assert clipped.isolation == "known layers"


@pytest.mark.parametrize(
    ("model", "loss", "words"),
    [
        (Made(lambda head, x: head(x)[:, :, 5]), cross_entropy, "IndexError"),
        (Made(overwritten), cross_entropy, "inplace"),
        (nn.Linear(5, 3), cross_entropy, "shapes"),
        (nn.Linear(6, 3), lambda out, y: out.detach().sum(1), "grad"),
    ],
)
def test_model_that_fails_is_refused_in_one_line(
    model: nn.Module, loss: Loss, words: str
) -> None:
    inputs, targets = batch()
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        ClippedGradients(model, loss, 1.0).prepare(inputs[:0], targets[:0])
    assert "made-up" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_what_is_left_in_a_layer_reaches_no_later_call() -> None:
    class Stashes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.head(x) * (1 + getattr(self.head, "calls", 0))
            if self.training:
                self.head.calls = 1  # type: ignore[assignment]
                self.head.register_buffer("more", torch.ones(1))
                self.head._parameters["odd"] = None
            return y

    model = Stashes()
    clipped = ClippedGradients(model, cross_entropy, 0.01)
    inputs, targets = batch()
    first = clipped.flat_sum(inputs, targets)
    assert torch.equal(clipped.flat_sum(inputs, targets), first)
    assert not hasattr(model.head, "calls")
    assert list(model.head._parameters) == ["weight", "bias"]
    assert not model.head._buffers


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_torch_losses_lose_their_reduction(reduction: str) -> None:
    outputs, targets = torch.randn(5, 3), torch.randint(3, (5,))
    loss = nn.CrossEntropyLoss(reduction=reduction)
    values = PerExampleLoss(loss)(outputs, targets)
    assert torch.equal(values, cross_entropy(outputs, targets))
    assert loss.reduction == reduction


@pytest.mark.parametrize(
    "loss",
    [
        functional.cross_entropy,  # a mean over the batch
        functools.partial(functional.mse_loss, reduction="none"),  # broadcasts
        lambda outputs, targets: outputs,  # three values per example
    ],
)
def test_loss_without_one_value_per_example_is_refused(loss: Loss) -> None:
    model = nn.Linear(2, 1 if isinstance(loss, functools.partial) else 3)
    clipped = ClippedGradients(model, loss, 1.0)
    targets = torch.rand(5) if model.out_features == 1 else torch.randint(3, (5,))
    with pytest.raises(UnsupportedModelError, match="one value per example"):
        clipped(torch.randn(5, 2), targets)


def test_weighted_mean_is_refused_because_it_mixes_examples() -> None:
    weight = torch.tensor([1.0, 2.0, 3.0])
    with pytest.raises(UnsupportedModelError, match="reduction='none'"):
        PerExampleLoss(nn.CrossEntropyLoss(weight=weight))
    none = PerExampleLoss(nn.CrossEntropyLoss(weight=weight, reduction="none"))
    assert none(torch.zeros(2, 3), torch.tensor([0, 2])).shape == (2,)


def test_targets_may_hold_more_than_tensors() -> None:
    """They are counted by their tensors, wherever those are in the nest."""
    loss = PerExampleLoss(lambda outputs, targets: outputs.squeeze(1) - targets["y"])
    targets = {"name": ["a", "b"], "y": torch.zeros(3)}
    assert loss(torch.ones(3, 1), targets).tolist() == [1.0, 1.0, 1.0]  # type: ignore[arg-type]
