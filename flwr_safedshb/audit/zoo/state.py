"""Models that work in place, and models and losses that keep values of examples.

The first may be trained: every pass has a copy of its inputs. The others must be
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional

from flwr_safedshb.audit.target_model import Subject
from flwr_safedshb.audit.zoo.plain import cross_entropy
from flwr_safedshb.audit.zoo.random import ROW

Work = Callable[["Stateful", torch.Tensor], torch.Tensor]


class Stateful(nn.Module):
    """A linear layer with places for state, and work before it while it trains.

    Parameters
    ----------
    work : callable (model, inputs) -> Tensor
        Returns what the layer gets.
    """

    in_class = torch.zeros(6)

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.frozen = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.buffer: torch.Tensor
        self.register_buffer("buffer", torch.zeros(6))
        self.attribute = torch.zeros(6)
        self.listed = [torch.zeros(6)]
        self.work = work

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return scores of three classes."""
        if self.training:
            inputs = self.work(self, inputs)
        outputs: torch.Tensor = self.layer(inputs)
        return outputs


def _running(old: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return a running mean, which stays finite."""
    mean = inputs.detach().to(old.dtype).mean(dim=0).nan_to_num(0.0)
    return 0.9 * old + 0.1 * mean.clamp(-1e3, 1e3)


def _doubled(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
    return inputs.mul_(2.0)


def _sorted(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
    inputs[:, 0] = inputs.max(dim=1).values
    return inputs.clamp_(-3.0, 3.0)


def _residual(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
    return inputs + functional.relu(inputs, inplace=True)


def _dropped(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
    return functional.dropout(inputs, 0.5, inplace=True)


def _parameter(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
    hidden = inputs - model.frozen
    with torch.no_grad():
        model.frozen.copy_(_running(model.frozen, inputs))
    return hidden


def _parameter_data(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
    hidden = inputs - model.frozen
    model.frozen.data = _running(model.frozen, inputs)
    return hidden


def _trained_data(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
    model.layer.weight.data[:, 0] += inputs.detach().mean().nan_to_num(0.0) * 1e-3
    return inputs


def _buffer(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
    hidden = inputs - model.buffer
    model.buffer = _running(model.buffer, inputs)
    return hidden


def _attribute(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
    hidden = inputs - model.attribute
    model.attribute = _running(model.attribute, inputs)
    return hidden


def _in_class(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
    hidden = inputs - Stateful.in_class
    Stateful.in_class = _running(Stateful.in_class, inputs)
    return hidden


def _large_only(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
    hidden = inputs - model.frozen
    if bool((inputs.detach().abs() > 100).any()):
        model.frozen.data = _running(model.frozen, inputs)
    return hidden


def _by_numpy(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
    hidden = inputs - model.frozen
    memory = model.frozen.detach().numpy()
    memory[:] = _running(model.frozen.detach(), inputs).numpy()
    return hidden


def _listed(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
    hidden = inputs - model.listed[0]
    model.listed[0] = _running(model.listed[0], inputs)
    return hidden


def _renormalised(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
    entries = inputs.detach().nan_to_num(0.0).clamp(0, 2).long()
    rows = functional.embedding(entries, model.layer.weight, max_norm=0.5)
    return inputs + rows.mean(dim=1)


def _in_closure() -> nn.Module:
    seen = [torch.zeros(6)]

    def work(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs - seen[0]
        seen[0] = _running(seen[0], inputs)
        return hidden

    return Stateful(work)


class _MaxNorm(nn.Module):
    """A table whose rows are shortened where they are looked up, tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        entries = inputs.detach().sum(dim=1).nan_to_num(0.0).clamp(0, 2).long()
        rows = functional.embedding(entries, self.head.weight, max_norm=0.1)
        outputs: torch.Tensor = self.head(inputs + rows)
        return outputs


class _RunningLoss(nn.Module):
    """Divides by a running mean of the losses, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.ones(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        values = cross_entropy(outputs, targets)
        scaled = values / self.mean.to(values.dtype)
        newest = values.detach().mean().nan_to_num(1.0).clamp(0.1, 1e3)
        self.mean = 0.9 * self.mean + 0.1 * newest.to(self.mean.dtype)
        return scaled


def _closing_loss() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a loss with a running mean in its closure."""
    mean = [1.0]

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        values = cross_entropy(outputs, targets)
        scaled = values * mean[0]
        newest = float(values.detach().mean().nan_to_num(1.0).clamp(0.1, 1e3))
        mean[0] = 0.9 * mean[0] + 0.1 * newest
        return scaled

    return loss


def _working(work: Work) -> Callable[[], nn.Module]:
    return lambda: Stateful(work)


def _sequence(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*layers, nn.Linear(6, 3))


def _linear() -> nn.Module:
    return nn.Linear(6, 3)


IN_PLACE = (
    Subject(
        "Dropout in place, first",
        _sequence(nn.Dropout(0.5, inplace=True)),
        cross_entropy,
        ROW,
    ),
    Subject(
        "AlphaDropout in place, first",
        _sequence(nn.AlphaDropout(0.5, inplace=True)),
        cross_entropy,
        ROW,
    ),
    Subject(
        "ReLU in place, first",
        _sequence(nn.ReLU(inplace=True)),
        nn.CrossEntropyLoss(),
        ROW,
    ),
    Subject(
        "layers in place",
        _sequence(
            nn.Dropout(0.5, inplace=True),
            nn.Linear(6, 6),
            nn.Dropout(0.5, inplace=True),
            nn.ReLU(inplace=True),
        ),
        cross_entropy,
        ROW,
    ),
    Subject("doubles its inputs", _working(_doubled), cross_entropy, ROW),
    Subject("overwrites its inputs", _working(_sorted), cross_entropy, ROW),
    Subject("residual in place", _working(_residual), cross_entropy, ROW),
    Subject("dropout in place", _working(_dropped), cross_entropy, ROW),
)
STATE = tuple(
    replace(subject, must_refuse=True)
    for subject in (
        Subject("frozen running mean", _working(_parameter), cross_entropy, ROW),
        Subject(
            "frozen running mean, by data",
            _working(_parameter_data),
            cross_entropy,
            ROW,
        ),
        Subject("trained weight, by data", _working(_trained_data), cross_entropy, ROW),
        Subject("buffer", _working(_buffer), cross_entropy, ROW),
        Subject("attribute", _working(_attribute), cross_entropy, ROW),
        Subject("class attribute", _working(_in_class), cross_entropy, ROW),
        Subject("closure", _in_closure, cross_entropy, ROW),
        Subject("state of large values", _working(_large_only), cross_entropy, ROW),
        Subject("frozen memory, by numpy", _working(_by_numpy), cross_entropy, ROW),
        Subject("max_norm on a weight", _working(_renormalised), cross_entropy, ROW),
        Subject("max_norm on a tied table", _MaxNorm, cross_entropy, ROW),
        Subject("running loss in a buffer", _linear, _RunningLoss(), ROW),
        Subject("running loss in a closure", _linear, _closing_loss(), ROW),
    )
)
SUBJECTS = (*IN_PLACE, Subject("list", _working(_listed), cross_entropy, ROW), *STATE)
