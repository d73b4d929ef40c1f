"""Models of every kind of layer that clipping has to bound, small and quick."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from flwr_safedshb.audit.target_model import Subject, floats, tokens
from flwr_safedshb.audit.zoo.residual import resnet18

ALL_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
TWO_TYPES = (torch.float32, torch.bfloat16)
Forward = Callable[[torch.Tensor], torch.Tensor]


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each example."""
    return functional.cross_entropy(outputs, targets, reduction="none")


def logit_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each example with one output for two classes."""
    return functional.binary_cross_entropy_with_logits(
        outputs.squeeze(1), targets.to(outputs.dtype), reduction="none"
    )


def linear_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum of an example's outputs: what comes back is one everywhere."""
    return outputs.flatten(1).sum(dim=1)


class _Mean(nn.Module):
    """The mean over the positions of each example."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.mean(dim=1)


class _Attention(nn.Module):
    """One head of attention with a residual connection, on (k, positions, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.norm(inputs)
        scores = self.query(x) @ self.key(x).mT / inputs.shape[-1] ** 0.5
        attended: torch.Tensor = scores.softmax(dim=-1) @ self.value(x)
        return inputs + attended


class _Shared(nn.Module):
    """One linear layer used twice, and a weight that no layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(self.inner(inputs).tanh() * self.scale)
        return outputs


class _Recurrent(nn.Module):
    """A recurrent layer over positions, and a linear one on its last output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.layer(inputs)[0][:, -1])
        return outputs


def _recurrent(kind: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from opacus import layers  # slow to import

        return _Recurrent(getattr(layers, kind)(4, 5, batch_first=True))

    return make


def _opacus_attention() -> nn.Module:
    from opacus.layers import DPMultiheadAttention

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = DPMultiheadAttention(6, 2, batch_first=True)
            self.head = nn.Linear(6, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            attended = self.attention(inputs, inputs, inputs)[0]
            outputs: torch.Tensor = self.head(attended.mean(dim=1))
            return outputs

    return Block()


def _logistic() -> nn.Module:
    return nn.Linear(8, 1)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def _dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 4))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),  # many positions, few weights
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 24, 3),  # few positions, many weights
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(96, 3),
    )


def _grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=2, dilation=2, padding=2),
        nn.Tanh(),
        nn.Conv2d(8, 8, (2, 3), groups=8, stride=(2, 1)),
        nn.Flatten(),
        nn.Linear(8 * 3 * 4, 3),
    )


def _conv1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(4, 16, 3, dilation=3), nn.Flatten(), nn.Linear(32, 3)
    )


def _conv3d() -> nn.Module:
    return nn.Sequential(nn.Conv3d(1, 2, 2), nn.Flatten(), nn.Linear(16, 3))


def _transposed() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(2, 3, 2, stride=2), nn.Flatten(), nn.Linear(108, 3)
    )


def _sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16, bias=False), _Mean())


def _embedding() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(12, 6, padding_idx=0), nn.LayerNorm(6), _Mean(), nn.Linear(6, 3)
    )


def _bag() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(12, 6), nn.Linear(6, 3))


def _attention() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(12, 16), _Attention(16), _Attention(16), _Mean(), nn.Linear(16, 3)
    )


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, _Mean(), nn.Linear(16, 3))


def _frozen_norm() -> nn.Module:
    norm = nn.BatchNorm1d(6).eval().requires_grad_(False)
    norm.running_mean = torch.randn(6)
    return nn.Sequential(nn.Linear(6, 6), norm, nn.ReLU(), nn.Linear(6, 3))


def _weight_norm() -> nn.Module:
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    return nn.Sequential(normed, nn.Tanh(), nn.Linear(6, 3))


SUBJECTS = (
    Subject("logistic", _logistic, logit_loss, floats(8, classes=2), ALL_TYPES),
    Subject("MLP", _mlp, cross_entropy, floats(8, classes=4), ALL_TYPES),
    Subject("MLP with dropout", _dropout, cross_entropy, floats(8, classes=4)),
    Subject("CNN", _cnn, cross_entropy, floats(1, 6, 6, classes=3), ALL_TYPES),
    Subject(
        "grouped and dilated convolutions",
        _grouped,
        cross_entropy,
        floats(4, 6, 6, classes=3),
    ),
    Subject("dilated Conv1d", _conv1d, cross_entropy, floats(4, 8, classes=3)),
    Subject("Conv3d", _conv3d, cross_entropy, floats(1, 3, 3, 3, classes=3)),
    Subject("ConvTranspose2d", _transposed, cross_entropy, floats(2, 3, 3, classes=3)),
    Subject("linear on a sequence", _sequence, linear_loss, floats(4, 16, classes=2)),
    Subject("embedding", _embedding, cross_entropy, tokens(7, 12, 3), ALL_TYPES),
    Subject("EmbeddingBag", _bag, cross_entropy, tokens(7, 12, 3)),
    Subject("attention", _attention, cross_entropy, tokens(4, 12, 3), TWO_TYPES),
    Subject(
        "nn.Transformer layer", _transformer, cross_entropy, floats(4, 16, classes=3)
    ),
    Subject(
        "DPMultiheadAttention",
        _opacus_attention,
        cross_entropy,
        floats(5, 6, classes=3),
    ),
    Subject("DPLSTM", _recurrent("DPLSTM"), cross_entropy, floats(4, 4, classes=3)),
    Subject("DPGRU", _recurrent("DPGRU"), cross_entropy, floats(4, 4, classes=3)),
    Subject("DPRNN", _recurrent("DPRNN"), cross_entropy, floats(4, 4, classes=3)),
    Subject("shared and bare weights", _Shared, cross_entropy, floats(6, classes=6)),
    Subject("frozen BatchNorm", _frozen_norm, cross_entropy, floats(6, classes=3)),
    Subject("weight_norm", _weight_norm, cross_entropy, floats(6, classes=3)),
    Subject(
        "ResNet-18 with GroupNorm, an eighth as wide",
        lambda: resnet18(3, width=8),
        cross_entropy,
        floats(3, 8, 8, classes=3),
        # In parts of a batch, as gradients of a wide one are held: the same layers, and
        # thousands of candidates in the time of a few.
        clipping="ghost",
        driven=False,
    ),
)
