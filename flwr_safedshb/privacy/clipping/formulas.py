"""What each kind of layer makes of an example: the parts of its parameters.

A formula takes a layer and every use of it: what went in, and the gradients g of the
losses for what came out. Their first axis is that of the k examples, or a multiple of
it where a convolution or a group norm was given several images of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from flwr_safedshb.privacy.clipping.parts import Held, Outer, Rows, Spread, formed
from flwr_safedshb.privacy.clipping.sums import Part


@dataclass(frozen=True)
class Seen:
    """All uses of a layer in one pass.

    Attributes
    ----------
    uses : sequence of (inputs, g)
    count : int
        k.
    at : mapping from a parameter's name to a slice
        Where those that are trained are in the sum.
    dtype : torch.dtype
        In which is summed.
    room : callable (elements) -> Tensor, shape (elements,)
        Memory for gradients that are formed.
    """

    uses: Sequence[tuple[torch.Tensor, torch.Tensor]]
    count: int
    at: Mapping[str, slice]
    dtype: torch.dtype
    room: Callable[[int], torch.Tensor]

    def rows(self, which: int) -> torch.Tensor:
        """Return the inputs (0) or g (1) of all uses as (k, t, ...), t positions."""
        found = [use[which].to(self.dtype) for use in self.uses]
        split = [each.reshape(self.count, -1, each.shape[-1]) for each in found]
        return _joined(split, 1)


def _linear(layer: nn.Module, seen: Seen) -> list[Part]:
    a, g = seen.rows(0), seen.rows(1)
    return _weighted(seen, lambda some: a[some].mT.unsqueeze(1), g.mT.unsqueeze(1))


def _convolution(module: nn.Module, seen: Seen) -> list[Part]:
    layer = cast(_ConvNd, module)
    pads = layer._reversed_padding_repeated_twice
    images, returned = [], []
    for x, g in seen.uses:
        padded = functional.pad(x.to(seen.dtype), pads)
        images.append(padded.reshape(seen.count, -1, *padded.shape[1:]))
        # (k, images, channels, places) -> (k, groups, q, positions)
        back = g.to(seen.dtype).reshape(seen.count, -1, g.shape[1], g[0, 0].numel())
        shape = seen.count, layer.groups, g.shape[1] // layer.groups, -1
        returned.append(back.transpose(1, 2).reshape(shape))
    return _weighted(
        seen,
        lambda some: _joined([_windows(layer, x[some]) for x in images], 3),
        _joined(returned, 3),
    )


def _windows(layer: _ConvNd, images: torch.Tensor) -> torch.Tensor:
    """Return what each output of a convolution sees, (k, groups, p, t).

    Parameters
    ----------
    images : Tensor, shape (k, images, channels, ...)
    """
    axes = range(len(layer.kernel_size))
    seen = images
    for i in axes:
        width = layer.dilation[i] * (layer.kernel_size[i] - 1) + 1
        seen = seen.unfold(3 + i, width, layer.stride[i])[..., :: layer.dilation[i]]
    kernel = [3 + len(axes) + i for i in axes]
    ordered = seen.permute(0, 2, *kernel, 1, *(3 + i for i in axes))
    positions = ordered.shape[2 + len(axes) :].numel()
    return ordered.reshape(len(seen), layer.groups, -1, positions)


def _weighted(seen: Seen, spread: Spread, g: torch.Tensor) -> list[Part]:
    """Return the parts of a weight and its bias; see `formed` for the arguments."""
    weight, bias = seen.at.get("weight"), seen.at.get("bias")
    if weight is not None and g.shape[1] == g.shape[3] == 1:
        inputs = spread(slice(None))[:, 0, :, 0]
        return [Outer(inputs, g[:, 0, :, 0], weight, bias)]
    parts: list[Part] = []
    if bias is not None:
        parts.append(Held(g.sum(dim=3).flatten(1), bias))
    if weight is not None:
        room = seen.room(seen.count * (weight.stop - weight.start))
        parts.append(formed(spread, g, weight, room.view(seen.count, -1)))
    return parts


def _group_norm(module: nn.Module, seen: Seen) -> list[Part]:
    layer = cast(nn.GroupNorm, module)
    return _normed(
        seen,
        lambda x: functional.group_norm(x, layer.num_groups, eps=layer.eps),
        lambda g: (
            g.reshape(*g.shape[:2], -1).sum(dim=2).view(seen.count, -1, g.shape[1])
        ),
    )


def _layer_norm(module: nn.Module, seen: Seen) -> list[Part]:
    layer = cast(nn.LayerNorm, module)
    shape = list(layer.normalized_shape)
    return _normed(
        seen,
        lambda x: functional.layer_norm(x, shape, eps=layer.eps),
        lambda g: g.reshape(seen.count, -1, math.prod(shape)),
    )


def _normed(
    seen: Seen,
    norm: Callable[[torch.Tensor], torch.Tensor],
    split: Callable[[torch.Tensor], torch.Tensor],
) -> list[Part]:
    """Return the parts of a scale and a shift; `split` makes (k, t, n) of a use."""
    parts: list[Part] = []
    for name, at in seen.at.items():
        each = [g * norm(x) if name == "weight" else g for x, g in seen.uses]
        rows = _joined([split(g.to(seen.dtype)) for g in each], 1)
        parts.append(Held(rows.sum(dim=1), at))
    return parts


def _embedding(module: nn.Module, seen: Seen) -> list[Part]:
    layer = cast(nn.Embedding, module)
    entries = _joined([x.reshape(seen.count, -1) for x, _ in seen.uses], 1)
    g = seen.rows(1)
    if layer.padding_idx is not None:  # its row has no gradient
        g = g.masked_fill((entries == layer.padding_idx).unsqueeze(2), 0.0)
    return [Rows(entries, g, layer.num_embeddings, seen.at["weight"])]


def _joined(uses: list[torch.Tensor], dim: int) -> torch.Tensor:
    return uses[0] if len(uses) == 1 else torch.cat(uses, dim)


FORMULAS: dict[object, Callable[[nn.Module, Seen], list[Part]]] = {
    nn.Linear.forward: _linear,
    nn.Conv1d.forward: _convolution,
    nn.Conv2d.forward: _convolution,
    nn.Conv3d.forward: _convolution,
    nn.GroupNorm.forward: _group_norm,
    nn.LayerNorm.forward: _layer_norm,
    nn.Embedding.forward: _embedding,
}
