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

from flwr_safedshb.audit.target_model import TargetModel, cross_entropy, floats

ROW = floats(6, classes=3)
Work = Callable[["Stateful", torch.Tensor], torch.Tensor]


class Stateful(nn.Module):
    """A linear layer with places for state, and work before it while it trains.

    Parameters
    ----------
    work : callable (model, inputs) -> Tensor
        Returns what the layer gets, (k, 6).
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


def running_mean(old: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return a running mean of a batch, (6,), which stays finite."""
    mean = inputs.detach().to(old.dtype).mean(dim=0).nan_to_num(0.0)
    return 0.9 * old + 0.1 * mean.clamp(-1e3, 1e3)


def _overwrite_inputs(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
    inputs[:, 0] = inputs.max(dim=1).values
    return inputs.clamp_(-3.0, 3.0)


def _keep_in_parameter(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
    hidden = inputs - model.frozen
    with torch.no_grad():
        model.frozen.copy_(running_mean(model.frozen, inputs))
    return hidden


def _keep_in_data(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
    hidden = inputs - model.frozen
    model.frozen.data = running_mean(model.frozen, inputs)
    return hidden


def _keep_in_weight(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
    model.layer.weight.data[:, 0] += inputs.detach().mean().nan_to_num(0.0) * 1e-3
    return inputs


def _keep_in_buffer(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
    hidden = inputs - model.buffer
    model.buffer = running_mean(model.buffer, inputs)
    return hidden


def _keep_in_attribute(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
    hidden = inputs - model.attribute
    model.attribute = running_mean(model.attribute, inputs)
    return hidden


def _keep_in_class(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
    hidden = inputs - Stateful.in_class
    Stateful.in_class = running_mean(Stateful.in_class, inputs)
    return hidden


def _keep_large_only(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
    hidden = inputs - model.frozen
    if bool((inputs.detach().abs() > 100).any()):
        model.frozen.data = running_mean(model.frozen, inputs)
    return hidden


def _keep_by_numpy(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
    hidden = inputs - model.frozen
    memory = model.frozen.detach().numpy()
    memory[:] = running_mean(model.frozen.detach(), inputs).numpy()
    return hidden


def _keep_in_list(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
    hidden = inputs - model.listed[0]
    model.listed[0] = running_mean(model.listed[0], inputs)
    return hidden


def _renormalise_weight(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
    entries = inputs.detach().nan_to_num(0.0).clamp(0, 2).long()
    rows = functional.embedding(entries, model.layer.weight, max_norm=0.5)
    return inputs + rows.mean(dim=1)


def _make_closure_model() -> nn.Module:
    """Return a model that keeps a running mean in a closure."""
    seen = [torch.zeros(6)]

    def keep_in_closure(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs - seen[0]
        seen[0] = running_mean(seen[0], inputs)
        return hidden

    return Stateful(keep_in_closure)


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


class RunningLoss(nn.Module):
    """Divides by a running mean of the losses, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.ones(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return a value per example."""
        values = cross_entropy(outputs, targets)
        scaled = values / self.mean.to(values.dtype)
        newest = values.detach().mean().nan_to_num(1.0).clamp(0.1, 1e3)
        self.mean = 0.9 * self.mean + 0.1 * newest.to(self.mean.dtype)
        return scaled


def _make_closure_loss() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a loss that divides by a running mean, kept in its closure."""
    mean = [1.0]

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        values = cross_entropy(outputs, targets)
        scaled = values * mean[0]
        newest = float(values.detach().mean().nan_to_num(1.0).clamp(0.1, 1e3))
        mean[0] = 0.9 * mean[0] + 0.1 * newest
        return scaled

    return loss


def _working(name: str, work: Work) -> TargetModel:
    return TargetModel(name, lambda: Stateful(work), ROW)


def _linear_after(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*layers, nn.Linear(6, 3))


IN_PLACE = (
    TargetModel(
        "Dropout in place, first", _linear_after(nn.Dropout(0.5, inplace=True)), ROW
    ),
    TargetModel(
        "AlphaDropout in place, first",
        _linear_after(nn.AlphaDropout(0.5, inplace=True)),
        ROW,
    ),
    TargetModel(
        "ReLU in place, first",
        _linear_after(nn.ReLU(inplace=True)),
        ROW,
        nn.CrossEntropyLoss(),
    ),
    TargetModel(
        "layers in place",
        lambda: nn.Sequential(
            nn.Dropout(0.5, inplace=True),
            nn.Linear(6, 6),
            nn.Dropout(0.5, inplace=True),
            nn.ReLU(inplace=True),
            nn.Linear(6, 3),
        ),
        ROW,
    ),
    _working("doubles its inputs", lambda model, x: x.mul_(2.0)),
    _working("overwrites its inputs", _overwrite_inputs),
    _working(
        "residual in place", lambda model, x: x + functional.relu(x, inplace=True)
    ),
    _working(
        "dropout in place", lambda model, x: functional.dropout(x, 0.5, inplace=True)
    ),
)
_KEEPING: tuple[TargetModel, ...] = (
    _working("frozen running mean", _keep_in_parameter),
    _working("frozen running mean, by data", _keep_in_data),
    _working("trained weight, by data", _keep_in_weight),
    _working("buffer", _keep_in_buffer),
    _working("attribute", _keep_in_attribute),
    _working("class attribute", _keep_in_class),
    TargetModel("closure", _make_closure_model, ROW),
    _working("state of large values", _keep_large_only),
    _working("frozen memory, by numpy", _keep_by_numpy),
    _working("max_norm on a weight", _renormalise_weight),
    TargetModel("max_norm on a tied table", _MaxNorm, ROW),
    TargetModel(
        "running loss in a buffer", lambda: nn.Linear(6, 3), ROW, RunningLoss()
    ),
    TargetModel(
        "running loss in a closure", lambda: nn.Linear(6, 3), ROW, _make_closure_loss()
    ),
)
MUST_REFUSE = tuple(replace(target, must_refuse=True) for target in _KEEPING)
# A list is copied for every example, so nothing stays in it.
MODELS = (*IN_PLACE, _working("list", _keep_in_list), *MUST_REFUSE)
