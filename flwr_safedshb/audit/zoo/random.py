"""Models that draw random numbers: dropout of every kind, and noise of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from flwr_safedshb.audit.target_model import Subject, floats
from flwr_safedshb.audit.zoo.plain import Forward, cross_entropy

ROW, IMAGE = floats(6, classes=3), floats(2, 3, 3, classes=3)


class Between(nn.Module):
    """Two linear layers and a function between them.

    Parameters
    ----------
    between : callable (hidden) -> Tensor
    always : bool
        Whether it is there in evaluation, too.
    """

    def __init__(self, between: Forward, always: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.between, self.always = between, always

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return scores of three classes."""
        hidden = self.first(inputs)
        if self.training or self.always:
            hidden = self.between(hidden)
        outputs: torch.Tensor = self.last(hidden)
        return outputs


def between(function: Forward) -> Callable[[], nn.Module]:
    """Return a maker of models with a function between two layers."""
    return lambda: Between(function)


def _noisy(function: Forward) -> Callable[[], nn.Module]:
    return lambda: Between(function, always=False)


def _rows(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(6, 6), layer(), nn.Linear(6, 3))


def _images(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Conv2d(2, 4, 2), layer(), nn.Flatten(), nn.Linear(16, 3)
    )


def _volume(layer: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Conv3d(1, 2, 2), layer, nn.Flatten(), nn.Linear(16, 3)
    )


def _dropout1d() -> nn.Module:
    layers = nn.Flatten(2), nn.Dropout1d(0.5), nn.Flatten(), nn.Linear(16, 3)
    return nn.Sequential(nn.Conv2d(2, 4, 2), *layers)


def _first(layer: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(layer, nn.Linear(6, 3))


def _poisson(hidden: torch.Tensor) -> torch.Tensor:
    """Draw numbers whose consumption of randomness depends on values."""
    rates = hidden.detach().nan_to_num(0.0).clamp(0.0, 1e6)
    return hidden + torch.poisson(rates) * 1e-3


def _bernoulli(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * torch.bernoulli(hidden.detach().sigmoid())


def _gaussian(hidden: torch.Tensor) -> torch.Tensor:
    return hidden + hidden.detach().abs() * torch.randn_like(hidden)


def _multinomial(hidden: torch.Tensor) -> torch.Tensor:
    chosen = torch.multinomial(hidden.detach().softmax(dim=1), 6, replacement=True)
    return hidden.gather(1, chosen)


def _permuted(hidden: torch.Tensor) -> torch.Tensor:
    return hidden[:, torch.randperm(6)]


def _mixed_noise(hidden: torch.Tensor) -> torch.Tensor:
    """Draw noise only where a value is positive."""
    noise = hidden.new_zeros(hidden.shape)
    chosen = hidden.detach() > 0
    noise[chosen] = torch.rand(int(chosen.sum()), dtype=hidden.dtype)
    return hidden * (1.0 + noise)


def _gumbel(hidden: torch.Tensor) -> torch.Tensor:
    return functional.gumbel_softmax(hidden, hard=True) * hidden


SUBJECTS = (
    Subject("Dropout first", _first(nn.Dropout(0.5)), cross_entropy, ROW),
    Subject("Dropout1d", _dropout1d, cross_entropy, IMAGE),
    Subject("Dropout2d", _images(lambda: nn.Dropout2d(0.5)), cross_entropy, IMAGE),
    Subject(
        "Dropout3d",
        _volume(nn.Dropout3d(0.5)),
        cross_entropy,
        floats(1, 3, 3, 3, classes=3),
    ),
    Subject("AlphaDropout", _rows(lambda: nn.AlphaDropout(0.5)), cross_entropy, ROW),
    Subject(
        "FeatureAlphaDropout",
        _images(lambda: nn.FeatureAlphaDropout(0.5)),
        cross_entropy,
        IMAGE,
    ),
    Subject("functional dropout", _noisy(functional.dropout), cross_entropy, ROW),
    Subject(
        "functional alpha dropout",
        _noisy(lambda x: functional.alpha_dropout(x, training=True)),
        cross_entropy,
        ROW,
    ),
    Subject("RReLU", _rows(lambda: nn.RReLU(0.0, 1.0)), cross_entropy, ROW),
    Subject("Poisson noise", _noisy(_poisson), cross_entropy, ROW),
    Subject("Bernoulli gates", _noisy(_bernoulli), cross_entropy, ROW),
    Subject("Gaussian noise", _noisy(_gaussian), cross_entropy, ROW),
    Subject("multinomial choice", _noisy(_multinomial), cross_entropy, ROW),
    Subject("random permutation", _noisy(_permuted), cross_entropy, ROW),
    Subject("noise where positive", _noisy(_mixed_noise), cross_entropy, ROW),
    Subject("hard Gumbel softmax", _noisy(_gumbel), cross_entropy, ROW),
)
