"""Layers that have a formula: what they see in a pass, and what each makes of it.

A layer with a formula is watched: it works on all k examples at once, also where
`torch.vmap` lets the model see one at a time, and its inputs are kept with the place of
its outputs in the graph. The formula takes every use of the layer: what went in, and
the gradients g of the losses for what came out. Their first axis is that of the k
examples, or a multiple of it where a layer was given several images of each. It
returns the parts (`sums`) of the layer's parameters.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from flwr_safedshb.privacy.clipping.sums import Held, Outer, Part, Rows

# Elements that are worked on at a time: few, so that they stay in the cache.
_CACHED = 2**18
Spread = Callable[[slice], torch.Tensor]


class _Unwrapped(torch.autograd.Function):
    """Calls a function of what `torch.vmap` works on, with examples first."""

    @staticmethod
    def forward(*_: object) -> torch.Tensor:
        raise RuntimeError("a watched layer was called outside of a pass")

    @staticmethod
    def setup_context(*_: object) -> None:
        """Keep nothing: what the function does is differentiated by itself."""

    @staticmethod
    def vmap(
        info: Any,  # torch's own, without a public name
        in_dims: tuple[int | None, ...],
        inputs: torch.Tensor,
        ticket: torch.Tensor,
        function: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, int]:
        if in_dims[0] is None:  # the same for all examples, as positions often are
            return function(inputs.expand(info.batch_size, *inputs.shape)), 0
        return function(inputs.movedim(in_dims[0], 0)), 0


class Watch:
    """Watches layers of a model.

    Attributes
    ----------
    uses : mapping from layers to lists of inputs and places in the graph
        Of the last pass; to be emptied before another.
    ticket : Tensor, or None
        Under `torch.vmap`, a tensor of one example, by which vmap knows itself.
    """

    def __init__(
        self,
        layers: list[nn.Module],
        places: Mapping[nn.Parameter, slice],
        dtype: torch.dtype,
    ) -> None:
        self.layers, self._dtype = layers, dtype
        self.ticket = cast("torch.Tensor | None", None)
        self.uses: dict[nn.Module, list[tuple[torch.Tensor, GradientEdge]]]
        self.uses = defaultdict(list)
        self._rooms: dict[nn.Module, torch.Tensor] = {}
        self._places: dict[nn.Module, dict[str, slice]] = {}
        for layer in layers:
            layer.forward = self._watched(layer)
            own = layer.named_parameters(recurse=False)
            self._places[layer] = {n: places[p] for n, p in own if p in places}

    def ignore_unused(self) -> None:
        """Watch those layers no longer that the last pass did not call."""
        for layer in self.layers:
            if layer not in self.uses:
                del layer.forward
        self.layers = [layer for layer in self.layers if layer in self.uses]

    def parts(
        self, losses: torch.Tensor, copies: Sequence[tuple[slice, torch.Tensor]]
    ) -> list[Part]:
        """Return the gradients of k examples for the layers, and for some copies.

        `losses` has the shape (k,), and every copy (k, ...), one for each example, with
        its place in the sum. What was used is let go: its memory is free for the next.
        """
        edges = [use[1] for layer in self.layers for use in self.uses[layer]]
        wanted: Sequence[torch.Tensor] = [*edges, *(each for _, each in copies)]  # type: ignore[list-item]  # torch takes both
        found = list(torch.autograd.grad(losses.sum(), wanted, allow_unused=True))
        parts: list[Part] = []
        for place, _ in reversed(copies):
            if (g := found.pop()) is not None:
                parts.append(Held(g.flatten(1).to(self._dtype), place))
        for layer in reversed(self.layers):
            uses = []
            for inputs, _ in reversed(self.uses.pop(layer)):
                if (g := found.pop()) is not None:
                    uses.append((inputs, g))
            if uses:
                places, room = self._places[layer], partial(self._room, layer)
                seen = Seen(uses, len(losses), places, self._dtype, room)
                parts += FORMULAS[type(layer).forward](layer, seen)
        return parts

    def _room(self, layer: nn.Module, shape: tuple[int, int]) -> torch.Tensor:
        """Return memory that stays: new memory costs more than what is done in it."""
        room, elements = self._rooms.get(layer), math.prod(shape)
        if room is None or len(room) < elements:
            device = next(layer.parameters()).device
            room = torch.empty(elements, dtype=self._dtype, device=device)
            self._rooms[layer] = room
        return room[:elements].view(shape)

    def _watched(self, layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        own = type(layer).forward

        def see(inputs: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = own(layer, inputs)
            # The edge, and not the output, which may be overwritten in place.
            use = inputs.detach(), get_gradient_edge(outputs)
            self.uses[layer].append(use)
            return outputs

        def see_all(inputs: torch.Tensor) -> torch.Tensor:
            if not _folds(layer, inputs):
                return see(inputs)
            outputs = see(inputs.flatten(0, 1))
            return outputs.view(*inputs.shape[:2], *outputs.shape[1:])

        def forward(input: torch.Tensor) -> torch.Tensor:  # torch's name
            if self.ticket is None:
                return see(input)
            unwrapped = cast(Any, _Unwrapped).apply(input, self.ticket, see_all)
            return cast(torch.Tensor, unwrapped)

        return forward


def _folds(layer: nn.Module, inputs: torch.Tensor) -> bool:
    """Say if a layer that knows one axis of examples was given two."""
    if isinstance(layer, _ConvNd):
        return inputs.dim() == 3 + len(layer.kernel_size)
    return isinstance(layer, nn.GroupNorm)


@dataclass(frozen=True)
class Seen:
    """All uses of a layer in one pass, and memory for gradients that are formed."""

    uses: Sequence[tuple[torch.Tensor, torch.Tensor]]  # inputs, g
    count: int  # k
    at: Mapping[str, slice]  # where parameters that are trained are in the sum
    dtype: torch.dtype  # in which is summed
    room: Callable[[tuple[int, int]], torch.Tensor]

    def rows(self, which: int) -> torch.Tensor:
        """Return the inputs (0) or g (1) of all uses as (k, t, ...), t positions."""
        found = [use[which].to(self.dtype) for use in self.uses]
        split = [each.reshape(self.count, -1, each.shape[-1]) for each in found]
        return _joined(split, 1)


def _linear(layer: nn.Module, seen: Seen) -> list[Part]:
    a, g, at = seen.rows(0), seen.rows(1), seen.at
    if a.shape[1] == 1 and "weight" in at:  # a position: two vectors are enough
        return [Outer(a[:, 0], g[:, 0], at["weight"], at.get("bias"))]
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
    """Return the parts of a weight and its bias: sums of outer products over positions.

    Parameters
    ----------
    spread : callable (examples: slice) -> Tensor, shape (k', channels, p, t)
        The inputs at every one of t positions, in separate channels.
    g : Tensor, shape (k, channels, q, t)
    """
    weight, bias = seen.at.get("weight"), seen.at.get("bias")
    parts: list[Part] = []
    if bias is not None:
        parts.append(Held(g.sum(dim=3).flatten(1), bias))
    if weight is not None:
        rows = seen.room((seen.count, weight.stop - weight.start))
        gradients = rows.view(*g.shape[:3], -1)
        step = max(1, _CACHED // (gradients[0, :, 0].numel() * g.shape[3]))
        for start in range(0, len(g), step):
            some = slice(start, start + step)
            torch.matmul(g[some], spread(some).mT, out=gradients[some])
        parts.append(Held(rows, weight))
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
