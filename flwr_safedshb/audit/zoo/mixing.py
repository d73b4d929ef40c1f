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

from flwr_safedshb.audit.target_model import Subject, floats
from flwr_safedshb.audit.zoo.plain import cross_entropy

Mix = Callable[[torch.Tensor], torch.Tensor]


class _Layers(nn.Module):
    """Two linear layers and something between them."""

    def __init__(self, between: Mix, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.between = between
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.between(self.first(inputs)))
        outputs: torch.Tensor = self.last(hidden)
        return outputs


def _centred(hidden: torch.Tensor) -> torch.Tensor:
    return hidden - hidden.mean(dim=0)


def _normed(hidden: torch.Tensor) -> torch.Tensor:
    return functional.batch_norm(hidden, None, None, training=True)


def _mixed_up(hidden: torch.Tensor) -> torch.Tensor:
    return 0.6 * hidden + 0.4 * hidden.roll(1, dims=0)


def _only_large(hidden: torch.Tensor) -> torch.Tensor:
    """Mix where a value is large: examples of ordinary size never show it."""
    return _centred(hidden) if bool(hidden.abs().max() > 1e3) else hidden


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


class _Sideways(nn.Module):
    """A layer that takes the first axis for positions: attention among examples."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inner, self.last = layer(), nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.inner(inputs)
        hidden = found[0] if isinstance(found, tuple) else found
        outputs: torch.Tensor = self.last(hidden.mean(dim=1))
        return outputs


def _dp_lstm() -> nn.Module:
    from opacus.layers import DPLSTM

    layer: nn.Module = DPLSTM(6, 6)  # batch_first is False
    return layer


def _encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(6, 2, 6, dropout=0.0)


def _softmax(dim: int | None) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Linear(6, 6), nn.Softmax(dim=dim), nn.Flatten(), nn.Linear(24, 3)
    )


def _flattened() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 6), nn.Flatten(0, 1), nn.Unflatten(0, (4, -1)), _Transposed()
    )


class _Transposed(nn.Module):
    """Cuts what was flattened in another place than it was joined."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.transpose(0, 1).flatten(1)[:, :3]


def relative_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Losses in units of the batch's mean loss."""
    losses = cross_entropy(outputs, targets)
    return losses / (losses.mean() + 1e-3)


def counted_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Losses weighted by how often their class is in the batch."""
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


def _linear() -> nn.Module:
    return nn.Linear(6, 3)


def _between(mix: Mix, dropout: float = 0.0) -> Callable[[], nn.Module]:
    return lambda: _Layers(mix, dropout)


ROW, SEQUENCE = floats(6, classes=3), floats(4, 6, classes=3)
SUBJECTS = (
    Subject("centred on the batch", _between(_centred), cross_entropy, ROW),
    Subject("centred, with dropout", _between(_centred, 0.5), cross_entropy, ROW),
    Subject("functional batch norm", _between(_normed), cross_entropy, ROW),
    Subject(
        "functional batch norm, dropout", _between(_normed, 0.5), cross_entropy, ROW
    ),
    Subject("mixup", _between(_mixed_up), cross_entropy, ROW),
    Subject("mixup, with dropout", _between(_mixed_up, 0.5), cross_entropy, ROW),
    Subject("mixes large values only", _between(_only_large), cross_entropy, ROW),
    Subject("mixes by a weight", lambda: _Gated("weight"), cross_entropy, ROW),
    Subject("mixes by a buffer", lambda: _Gated("buffer"), cross_entropy, ROW),
    Subject("mixes by a far weight", lambda: _Gated("late"), cross_entropy, ROW),
    Subject("softmax over examples", _softmax(0), cross_entropy, SEQUENCE),
    Subject("softmax over what it finds", _softmax(None), cross_entropy, SEQUENCE),
    Subject("flattened over examples", _flattened, cross_entropy, SEQUENCE),
    Subject(
        "attention among examples", lambda: _Sideways(_encoder), cross_entropy, SEQUENCE
    ),
    Subject(
        "DPLSTM over examples", lambda: _Sideways(_dp_lstm), cross_entropy, SEQUENCE
    ),
    Subject("loss in units of the mean", _linear, relative_loss, ROW),
    Subject("loss that counts classes", _linear, counted_loss, ROW),
    Subject("loss that remembers", _linear, RememberingLoss(), ROW),
    Subject("buffer that remembers", lambda: _Remembering(True), cross_entropy, ROW),
    Subject(
        "attribute that remembers", lambda: _Remembering(False), cross_entropy, ROW
    ),
)
