"""Models that draw random numbers: dropout of every kind, and noise of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from flwr_safedshb.audit.target_model import Between, TargetModel, floats
from flwr_safedshb.audit.zoo.layers import flat_classifier

ROW, IMAGE = floats(6, classes=3), floats(2, 3, 3, classes=3)
MakeLayer = Callable[[], nn.Module]


def _on_rows(make: MakeLayer) -> MakeLayer:
    return lambda: nn.Sequential(nn.Linear(6, 6), make(), nn.Linear(6, 3))


def _on_images(make: MakeLayer) -> MakeLayer:
    return lambda: flat_classifier(nn.Conv2d(2, 4, 2), make(), width=16)


def _add_poisson(hidden: torch.Tensor) -> torch.Tensor:
    """Draw numbers whose consumption of randomness depends on values."""
    rates = hidden.detach().nan_to_num(0.0).clamp(0.0, 1e6)
    return hidden + torch.poisson(rates) * 1e-3


def _choose_columns(hidden: torch.Tensor) -> torch.Tensor:
    chosen = torch.multinomial(hidden.detach().softmax(dim=1), 6, replacement=True)
    return hidden.gather(1, chosen)


def _scale_positive(hidden: torch.Tensor) -> torch.Tensor:
    """Draw noise only where a value is positive."""
    noise = hidden.new_zeros(hidden.shape)
    chosen = hidden.detach() > 0
    noise[chosen] = torch.rand(int(chosen.sum()), dtype=hidden.dtype)
    return hidden * (1.0 + noise)


# Functions between two layers that draw in training only.
_NOISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "functional dropout": functional.dropout,
    "functional alpha dropout": lambda x: functional.alpha_dropout(x, training=True),
    "Poisson noise": _add_poisson,
    "Bernoulli gates": lambda x: x * torch.bernoulli(x.detach().sigmoid()),
    "Gaussian noise": lambda x: x + x.detach().abs() * torch.randn_like(x),
    "multinomial choice": _choose_columns,
    "random permutation": lambda x: x[:, torch.randperm(6)],
    "noise where positive": _scale_positive,
    "hard Gumbel softmax": lambda x: functional.gumbel_softmax(x, hard=True) * x,
}
_VOLUME = floats(1, 3, 3, 3, classes=3)


def _with_noise(name: str) -> TargetModel:
    return TargetModel(name, lambda: Between(_NOISE[name], in_evaluation=False), ROW)


MODELS = (
    TargetModel(
        "Dropout first",
        lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)),
        ROW,
    ),
    TargetModel(
        "Dropout1d",
        lambda: flat_classifier(
            nn.Conv2d(2, 4, 2), nn.Flatten(2), nn.Dropout1d(0.5), width=16
        ),
        IMAGE,
    ),
    TargetModel("Dropout2d", _on_images(lambda: nn.Dropout2d(0.5)), IMAGE),
    TargetModel(
        "Dropout3d",
        lambda: flat_classifier(nn.Conv3d(1, 2, 2), nn.Dropout3d(0.5), width=16),
        _VOLUME,
    ),
    TargetModel("AlphaDropout", _on_rows(lambda: nn.AlphaDropout(0.5)), ROW),
    TargetModel(
        "FeatureAlphaDropout", _on_images(lambda: nn.FeatureAlphaDropout(0.5)), IMAGE
    ),
    TargetModel("RReLU", _on_rows(lambda: nn.RReLU(0.0, 1.0)), ROW),
    *map(_with_noise, _NOISE),
)
