"""What each kind of layer makes of an example, by parameter.

A formula takes the layer, its inputs and the gradients g of the losses for its outputs,
both with examples on the first axis, and gives a `Part` for each parameter that is
trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from flwr_safedshb.privacy.clipping.parts import (
    Held,
    Outer,
    Part,
    Products,
    Rooms,
    Rows,
)

Parts = dict[str, Part]  # by the parameter's name
Formula = Callable[[nn.Module, torch.Tensor, torch.Tensor, Rooms], Parts]


def _trained(layer: nn.Module, name: str) -> bool:
    parameter = layer._parameters[name]
    return parameter is not None and parameter.requires_grad


def _linear(
    layer: nn.Module, inputs: torch.Tensor, g: torch.Tensor, rooms: Rooms
) -> Parts:
    parts: Parts = {}
    if _trained(layer, "bias"):
        parts["bias"] = Held(g.flatten(1, -2).sum(dim=1) if g.dim() > 2 else g)
    if _trained(layer, "weight") and g.dim() == 2:
        parts["weight"] = Outer(inputs, g)
    elif _trained(layer, "weight"):
        a, g = inputs.flatten(1, -2), g.flatten(1, -2)
        parts["weight"] = Products(
            lambda examples: a[examples].unsqueeze(1).mT,
            g.unsqueeze(1).mT,
            a.shape[2],
            lambda g: g.squeeze(1).transpose(0, 1).flatten(1) @ a.flatten(0, 1),
            lambda: rooms.room(layer, len(g), g),
        )
    return parts


def _convolution(
    module: nn.Module, inputs: torch.Tensor, g: torch.Tensor, rooms: Rooms
) -> Parts:
    layer = cast(_ConvNd, module)
    parts: Parts = {}
    if _trained(layer, "bias"):
        parts["bias"] = Held(g.flatten(2).sum(dim=2))
    if _trained(layer, "weight"):
        shape = layer.weight.shape
        padded = functional.pad(inputs, layer._reversed_padding_repeated_twice)

        def plain(weighted: torch.Tensor) -> torch.Tensor:
            _, sums, _ = torch.ops.aten.convolution_backward(
                weighted.reshape(g.shape),
                padded,
                layer.weight.detach(),
                None,
                layer.stride,
                [0] * (g.dim() - 2),
                layer.dilation,
                False,
                [0] * (g.dim() - 2),
                layer.groups,
                [False, True, False],
            )
            return cast(torch.Tensor, sums)

        parts["weight"] = Products(
            lambda examples: _windows(layer, padded[examples]),
            torch.unflatten(g.flatten(2), 1, (layer.groups, -1)),
            shape[1:].numel(),
            plain,
            lambda: rooms.room(layer, len(g), g),
        )
    return parts


def _windows(layer: _ConvNd, padded: torch.Tensor) -> torch.Tensor:
    """Return what each output of a convolution sees: (k, groups, p, l)."""
    axes = range(len(layer.kernel_size))
    seen = padded
    for i in axes:
        width = layer.dilation[i] * (layer.kernel_size[i] - 1) + 1
        seen = seen.unfold(2 + i, width, layer.stride[i])[..., :: layer.dilation[i]]
    kernel = [2 + len(axes) + i for i in axes]
    ordered = seen.permute(0, 1, *kernel, *(2 + i for i in axes))
    rows = ordered.reshape(len(seen), layer.groups, -1, *seen.shape[2 : 2 + len(axes)])
    return rows.flatten(3)


def _normed(
    layer: nn.Module, g: torch.Tensor, normed: torch.Tensor, axes: tuple[int, ...]
) -> Parts:
    """Return the parts of a scale and a shift, by the axes that have one value each."""
    others = [axis for axis in range(1, g.dim()) if axis not in axes]
    parts: Parts = {}
    if _trained(layer, "weight"):
        scaled = g * normed
        parts["weight"] = Held(scaled.sum(dim=others) if others else scaled)
    if _trained(layer, "bias"):
        parts["bias"] = Held(g.sum(dim=others) if others else g)
    return parts


def _group_norm(
    module: nn.Module, inputs: torch.Tensor, g: torch.Tensor, rooms: Rooms
) -> Parts:
    layer = cast(nn.GroupNorm, module)
    normed = functional.group_norm(inputs, layer.num_groups, eps=layer.eps)
    return _normed(layer, g, normed, (1,))


def _layer_norm(
    module: nn.Module, inputs: torch.Tensor, g: torch.Tensor, rooms: Rooms
) -> Parts:
    layer = cast(nn.LayerNorm, module)
    shape = layer.normalized_shape
    normed = functional.layer_norm(inputs, list(shape), eps=layer.eps)
    return _normed(layer, g, normed, tuple(range(g.dim() - len(shape), g.dim())))


def _embedding(
    module: nn.Module, inputs: torch.Tensor, g: torch.Tensor, rooms: Rooms
) -> Parts:
    layer = cast(nn.Embedding, module)
    return {
        "weight": Rows(
            inputs.reshape(len(g), -1), g.reshape(len(g), -1, g.shape[-1]), layer
        )
    }


FORMULAS: dict[object, Formula] = {
    nn.Linear.forward: _linear,
    nn.Conv1d.forward: _convolution,
    nn.Conv2d.forward: _convolution,
    nn.Conv3d.forward: _convolution,
    nn.GroupNorm.forward: _group_norm,
    nn.LayerNorm.forward: _layer_norm,
    nn.Embedding.forward: _embedding,
}
