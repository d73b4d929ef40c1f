"""Models of every kind of layer that clipping has to bound, small and quick."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from flwr_safedshb.audit.target_model import (
    ComposedModel,
    TargetModel,
    floats,
    tokens,
)
from flwr_safedshb.audit.zoo.resnet import resnet18

ALL_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
TWO_TYPES = (torch.float32, torch.bfloat16)


def logit_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each example with one output for two classes."""
    return functional.binary_cross_entropy_with_logits(
        outputs.squeeze(1), targets.to(outputs.dtype), reduction="none"
    )


def linear_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum of an example's outputs: the gradient of each is 1."""
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


class _SharedLayer(nn.Module):
    """One linear layer used twice, and a weight that no layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(self.inner(inputs).tanh() * self.scale)
        return outputs


def _make_recurrent(kind: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from opacus import layers  # slow to import

        return ComposedModel(
            lambda model, x: model.head(model.layer(x)[0][:, -1]),
            layer=getattr(layers, kind)(4, 5, batch_first=True),
            head=nn.Linear(5, 3),
        )

    return make


def _opacus_attention() -> nn.Module:
    from opacus.layers import DPMultiheadAttention

    return ComposedModel(
        lambda model, x: model.head(model.attention(x, x, x)[0].mean(dim=1)),
        attention=DPMultiheadAttention(6, 2, batch_first=True),
        head=nn.Linear(6, 3),
    )


def flat_classifier(*layers: nn.Module, width: int) -> nn.Module:
    """Return layers, and a linear one of three classes on their flattened output."""
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 3))


def _cnn() -> nn.Module:
    many_positions, many_weights = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 24, 3)
    norm = nn.GroupNorm(2, 8)
    return flat_classifier(
        many_positions, norm, nn.ReLU(), many_weights, nn.ReLU(), width=96
    )


def _grouped_cnn() -> nn.Module:
    return flat_classifier(
        nn.Conv2d(4, 8, 3, groups=2, dilation=2, padding=2),
        nn.Tanh(),
        nn.Conv2d(8, 8, (2, 3), groups=8, stride=(2, 1)),
        width=8 * 3 * 4,
    )


def _embedding() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(12, 6, padding_idx=0), nn.LayerNorm(6), _Mean(), nn.Linear(6, 3)
    )


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


MODELS = (
    TargetModel(
        "logistic",
        lambda: nn.Linear(8, 1),
        floats(8, classes=2),
        logit_loss,
        ALL_TYPES,
    ),
    TargetModel(
        "MLP",
        lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        floats(8, classes=4),
        dtypes=ALL_TYPES,
    ),
    TargetModel(
        "MLP with dropout",
        lambda: nn.Sequential(
            nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 4)
        ),
        floats(8, classes=4),
    ),
    TargetModel("CNN", _cnn, floats(1, 6, 6, classes=3), dtypes=ALL_TYPES),
    TargetModel(
        "grouped and dilated convolutions",
        _grouped_cnn,
        floats(4, 6, 6, classes=3),
    ),
    TargetModel(
        "dilated Conv1d",
        lambda: flat_classifier(nn.Conv1d(4, 16, 3, dilation=3), width=32),
        floats(4, 8, classes=3),
    ),
    TargetModel(
        "Conv3d",
        lambda: flat_classifier(nn.Conv3d(1, 2, 2), width=16),
        floats(1, 3, 3, 3, classes=3),
    ),
    TargetModel(
        "ConvTranspose2d",
        lambda: flat_classifier(nn.ConvTranspose2d(2, 3, 2, stride=2), width=108),
        floats(2, 3, 3, classes=3),
    ),
    TargetModel(
        "linear on a sequence",
        lambda: nn.Sequential(nn.Linear(16, 16, bias=False), _Mean()),
        floats(4, 16, classes=2),
        linear_loss,
    ),
    TargetModel("embedding", _embedding, tokens(7, 12, 3), dtypes=ALL_TYPES),
    TargetModel(
        "EmbeddingBag",
        lambda: nn.Sequential(nn.EmbeddingBag(12, 6), nn.Linear(6, 3)),
        tokens(7, 12, 3),
    ),
    TargetModel("attention", _attention, tokens(4, 12, 3), dtypes=TWO_TYPES),
    TargetModel("nn.Transformer layer", _transformer, floats(4, 16, classes=3)),
    TargetModel("DPMultiheadAttention", _opacus_attention, floats(5, 6, classes=3)),
    TargetModel("DPLSTM", _make_recurrent("DPLSTM"), floats(4, 4, classes=3)),
    TargetModel("DPGRU", _make_recurrent("DPGRU"), floats(4, 4, classes=3)),
    TargetModel("DPRNN", _make_recurrent("DPRNN"), floats(4, 4, classes=3)),
    TargetModel("shared and bare weights", _SharedLayer, floats(6, classes=6)),
    TargetModel("frozen BatchNorm", _frozen_norm, floats(6, classes=3)),
    TargetModel("weight_norm", _weight_norm, floats(6, classes=3)),
    TargetModel(
        "ResNet-18 with GroupNorm, an eighth as wide",
        lambda: resnet18(3, width=8),
        floats(3, 8, 8, classes=3),
        # In parts of a batch, as gradients of a wide one are held: the same layers, and
        # thousands of candidates in the time of a few.
        clipping="ghost",
        optimise=False,
    ),
)
