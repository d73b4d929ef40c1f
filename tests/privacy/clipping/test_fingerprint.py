"""A model that is built like an earlier one is not checked again; any other is."""

from collections.abc import Callable
from threading import Lock
from typing import Any

import pytest
import torch
from torch import nn

from flwr_safedshb.privacy.clipping import validate_model as checks
from flwr_safedshb.privacy.clipping.fingerprint import make_fingerprint
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from tests.clipping import OwnForward, assert_close, cross_entropy, literal

torch.set_num_threads(1)


def mlp(dropout: float = 0.0, width: int = 8, frozen: bool = False) -> nn.Sequential:
    layers = nn.Sequential(
        nn.Linear(6, width), nn.Dropout(dropout), nn.ReLU(), nn.Linear(width, 3)
    )
    layers[0].requires_grad_(not frozen)
    return layers


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    return model


def with_attribute(value: object) -> nn.Module:
    model = mlp()
    model.setting = value  # type: ignore[assignment]
    return model


def hooked() -> nn.Module:
    model = mlp()
    model[0].register_forward_hook(lambda *_: None)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(5, 6), torch.randint(3, (5,))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Return the list of models that were checked."""
    checked: list[nn.Module] = []
    find = checks._choose_backward

    def spy(model: nn.Module, *more: Any) -> Any:
        checked.append(model)
        return find(model, *more)

    monkeypatch.setattr(checks, "_choose_backward", spy)
    monkeypatch.setattr(checks, "_backward_cache", {})
    return checked


def test_a_model_made_anew_is_checked_once_and_has_its_own_weights(
    counted: list[nn.Module],
) -> None:
    for frozen in (False, True):
        for seed in range(3):
            torch.manual_seed(seed)
            model, (inputs, targets) = OwnForward(mlp(frozen=frozen)), batch()
            found = ClippedGradients(model, cross_entropy, 0.5)(inputs, targets)
            expected = literal(model, cross_entropy, inputs, targets, 0.5)
            assert_close(found, expected)
    assert len(counted) == 2


def test_a_model_for_other_data_is_checked_again(counted: list[nn.Module]) -> None:
    inputs, targets = torch.randn(5, 4, 6), torch.randint(3, (5,))

    def sequence_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.flatten(1).sum(dim=1)

    for given in (inputs, inputs[:, :2], inputs[:, :2]):
        ClippedGradients(mlp(), sequence_loss, 1.0)(given, targets)
    assert len(counted) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: mlp(0.1), lambda: mlp(0.2)),
        (mlp, lambda: mlp(width=9)),
        (mlp, lambda: mlp(frozen=True)),
        (mlp, lambda: mlp().eval()),
        (mlp, lambda: mlp().double()),
        (mlp, lambda: OwnForward(mlp())),
        (mlp, hooked),
        (tied, lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))),
        (lambda: with_attribute(1), lambda: with_attribute(2)),
        (
            lambda: with_attribute(torch.zeros(3)),
            lambda: with_attribute(torch.ones(3)),
        ),
    ],
)
def test_models_that_are_built_otherwise_have_other_fingerprints(
    one: Callable[[], nn.Module], other: Callable[[], nn.Module]
) -> None:
    loss = nn.CrossEntropyLoss()
    same, again, not_same = (make_fingerprint(m, loss) for m in (one(), one(), other()))
    assert same is not None
    assert same == again
    assert same != not_same


def test_losses_with_other_weights_have_other_fingerprints() -> None:
    losses = [
        nn.CrossEntropyLoss(torch.tensor([1.0, w, 1.0]), reduction="none")
        for w in (1.0, 1.0, 2.0)
    ]
    first, second, third = (make_fingerprint(mlp(), loss) for loss in losses)
    assert first == second != third


def test_functions_made_anew_are_other_functions() -> None:
    def make() -> Callable[..., torch.Tensor]:
        return lambda outputs, targets: cross_entropy(outputs, targets)

    assert make_fingerprint(mlp(), make()) != make_fingerprint(mlp(), make())


def test_a_model_that_cannot_be_compared_has_no_fingerprint() -> None:
    assert make_fingerprint(with_attribute(Lock()), cross_entropy) is None
