"""Models and losses in which examples meet, those of one batch or of two calls.

Clipping bounds nothing where one example changes another one's gradient. The right
answers are a refusal, or sums in which the examples are kept apart; what is accepted
must keep the same bound as any other model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from flwr_safedshb.audit.target_model import (
    Between,
    ComposedModel,
    TargetModel,
    cross_entropy,
    floats,
)


def _centre(hidden: torch.Tensor) -> torch.Tensor:
    return hidden - hidden.mean(dim=0)


# Functions between two layers that mix the examples of a batch. The one for large
# values never shows with examples of ordinary size.
_MIXERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "centred": _centre,
    "functional batch norm": lambda x: functional.batch_norm(
        x, None, None, training=True
    ),
    "mixup": lambda x: 0.6 * x + 0.4 * x.roll(1, dims=0),
    "large": lambda x: _centre(x) if bool(x.abs().max() > 1e3) else x,
}


class _Gated(nn.Module):
    """Mixes as much as a weight of the server says; at the start, not at all."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.kind = kind
        if kind == "buffer":
            self.register_buffer("gate", torch.zeros(1))
        else:
            self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        gate = torch.sigmoid(self.gate - 100) if self.kind == "late" else self.gate
        outputs: torch.Tensor = self.last(hidden - gate * hidden.mean(dim=0))
        return outputs


class _Remembering(nn.Module):
    """Adds what it was given in the call before."""

    def __init__(self, as_buffer: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.seen: torch.Tensor
        if as_buffer:
            self.register_buffer("seen", torch.zeros(6))
        else:
            self.seen = torch.zeros(6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs + self.seen)
        # Halved, as a running mean would be; what is not finite would stay for ever.
        kept = 0.5 * self.seen + 0.5 * inputs.detach().mean(dim=0).nan_to_num(0.0)
        self.seen = kept.clamp(-1e3, 1e3)
        return outputs


def _sideways_encoder() -> nn.Module:
    """Attention that takes the first axis for positions."""
    return ComposedModel(
        lambda model, x: model.last(model.inner(x).mean(dim=1)),
        inner=nn.TransformerEncoderLayer(6, 2, 6, dropout=0.0),
        last=nn.Linear(6, 3),
    )


def _sideways_lstm() -> nn.Module:
    from opacus.layers import DPLSTM

    return ComposedModel(
        lambda model, x: model.last(model.inner(x)[0].mean(dim=1)),
        inner=DPLSTM(6, 6),  # batch_first is False
        last=nn.Linear(6, 3),
    )


def _softmax(dim: int | None) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Linear(6, 6), nn.Softmax(dim=dim), nn.Flatten(), nn.Linear(24, 3)
    )


class _Transposed(nn.Module):
    """Cuts what was flattened in another place than it was joined."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.transpose(0, 1).flatten(1)[:, :3]


def _flatten_wrongly() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 6), nn.Flatten(0, 1), nn.Unflatten(0, (4, -1)), _Transposed()
    )


def relative_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return losses in units of the batch's mean loss."""
    losses = cross_entropy(outputs, targets)
    return losses / (losses.mean() + 1e-3)


def counting_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return losses weighted by how often their class is in the batch."""
    counts = torch.bincount(targets, minlength=3).to(outputs.dtype)
    return cross_entropy(outputs, targets) * counts[targets]


class RememberingLoss:
    """Scales by the largest loss that was ever seen."""

    def __init__(self) -> None:
        self.largest = torch.ones(())

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return a value per example."""
        losses = cross_entropy(outputs, targets)
        scaled = losses * (1.0 + self.largest.to(losses.dtype))
        # No further than this, so that sums stay finite.
        newest = losses.detach().nan_to_num(0.0).max().float().clamp(max=1e3)
        self.largest = torch.maximum(0.9 * self.largest, newest)
        return scaled


ROW, SEQUENCE = floats(6, classes=3), floats(4, 6, classes=3)


def _mix_between(name: str, mixer: str, dropout: float = 0.0) -> TargetModel:
    return TargetModel(name, lambda: Between(_MIXERS[mixer], dropout=dropout), ROW)


def _linear() -> nn.Module:
    return nn.Linear(6, 3)


MODELS = (
    _mix_between("centred on the batch", "centred"),
    _mix_between("centred, with dropout", "centred", 0.5),
    _mix_between("functional batch norm", "functional batch norm"),
    _mix_between("functional batch norm, dropout", "functional batch norm", 0.5),
    _mix_between("mixup", "mixup"),
    _mix_between("mixup, with dropout", "mixup", 0.5),
    _mix_between("mixes large values only", "large"),
    TargetModel("mixes by a weight", lambda: _Gated("weight"), ROW),
    TargetModel("mixes by a buffer", lambda: _Gated("buffer"), ROW),
    TargetModel("mixes by a far weight", lambda: _Gated("late"), ROW),
    TargetModel("softmax over examples", _softmax(0), SEQUENCE),
    TargetModel("softmax over what it finds", _softmax(None), SEQUENCE),
    TargetModel("flattened over examples", _flatten_wrongly, SEQUENCE),
    TargetModel("attention among examples", _sideways_encoder, SEQUENCE),
    TargetModel("DPLSTM over examples", _sideways_lstm, SEQUENCE),
    TargetModel("loss in units of the mean", _linear, ROW, relative_loss),
    TargetModel("loss that counts classes", _linear, ROW, counting_loss),
    TargetModel("loss that remembers", _linear, ROW, RememberingLoss()),
    TargetModel("buffer that remembers", lambda: _Remembering(True), ROW),
    TargetModel("attribute that remembers", lambda: _Remembering(False), ROW),
)
