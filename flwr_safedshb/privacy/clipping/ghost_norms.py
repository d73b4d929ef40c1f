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
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from flwr_safedshb.privacy.clipping.clipped_sum import GradientPart, TablePart
from flwr_safedshb.privacy.clipping.total_losses import TotalFunctions

# Elements that are worked on at a time: few, so that they stay in the cache.
_CACHED = 2**18
Parts = list[GradientPart | TablePart]


class _VmapEscape(torch.autograd.Function):
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


class HookedLayer:
    """A layer that is watched, all its uses in a pass, and memory for its gradients.

    Parameters
    ----------
    layer : nn.Module
    places : mapping from parameters that are trained to slices
        Where they are in the sum.
    dtype : torch.dtype
        In which is summed.
    tickets : list of Tensor
        Under `torch.vmap`, a tensor of one example, by which vmap knows itself.

    Attributes
    ----------
    uses : list of inputs and places in the graph
        Of the last pass; to be emptied before another.
    seen : list of inputs and their g
        Of the uses that a loss depends on, by k examples (`count`).
    """

    def __init__(
        self,
        layer: nn.Module,
        places: Mapping[nn.Parameter, slice],
        dtype: torch.dtype,
        tickets: list[torch.Tensor],
    ) -> None:
        self.layer, self.dtype, self._tickets = layer, dtype, tickets
        own = layer.named_parameters(recurse=False)
        self.at = {name: places[p] for name, p in own if p in places}
        self.uses: list[tuple[torch.Tensor, GradientEdge]] = []
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.count = 0
        self._memory = cast(torch.Tensor, layer.weight).new_empty(0, dtype=dtype)
        layer.forward = self._forward()

    def parts(self, count: int, found: list[torch.Tensor | None]) -> Parts:
        """Return the gradients of k examples, from the last of those `found`.

        What was used is let go: its memory is free for the next.
        """
        self.count = count
        for inputs, _ in reversed(self.uses):
            if (g := found.pop()) is not None:
                self.seen.append((inputs, g))
        self.uses.clear()
        try:
            return FORMULAS[type(self.layer).forward](self) if self.seen else []
        finally:
            self.seen.clear()

    def rows(self, which: int) -> torch.Tensor:
        """Return the inputs (0) or g (1) of all uses as (k, t, ...), t positions."""
        found = [use[which].to(self.dtype) for use in self.seen]
        return _joined([x.reshape(self.count, -1, x.shape[-1]) for x in found], 1)

    def room(self, shape: tuple[int, int]) -> torch.Tensor:
        """Return memory that stays: new memory costs more than what is done in it."""
        if len(self._memory) < math.prod(shape):
            self._memory = self._memory.new_empty(math.prod(shape))
        return self._memory[: math.prod(shape)].view(shape)

    def _forward(self) -> Callable[[torch.Tensor], torch.Tensor]:
        own = type(self.layer).forward
        # The one with a formula that raises for some values; under vmap nothing that is
        # entered around the model reaches here.
        table = isinstance(self.layer, nn.Embedding)
        guard: type[AbstractContextManager[object]] = (
            TotalFunctions if table else nullcontext
        )

        def see(inputs: torch.Tensor) -> torch.Tensor:
            with guard():
                outputs: torch.Tensor = own(self.layer, inputs)
            # The edge, and not the output, which may be overwritten in place.
            self.uses.append((inputs.detach(), get_gradient_edge(outputs)))
            return outputs

        def see_all(inputs: torch.Tensor) -> torch.Tensor:
            if not _folds(self.layer, inputs):
                return see(inputs)
            outputs = see(inputs.flatten(0, 1))
            return outputs.view(*inputs.shape[:2], *outputs.shape[1:])

        def forward(input: torch.Tensor) -> torch.Tensor:  # torch's name
            if not self._tickets:
                return see(input)
            unwrapped = cast(Any, _VmapEscape).apply(input, self._tickets[0], see_all)
            return cast(torch.Tensor, unwrapped)

        return forward


def _folds(layer: nn.Module, inputs: torch.Tensor) -> bool:
    """Say if a layer that knows one axis of examples was given two."""
    if isinstance(layer, _ConvNd):
        return inputs.dim() == 3 + len(layer.kernel_size)
    return isinstance(layer, nn.GroupNorm)


def _linear(seen: HookedLayer) -> Parts:
    a, g, at = seen.rows(0), seen.rows(1), seen.at
    if a.shape[1] == 1 and "weight" in at:  # a position: two vectors are enough
        return [GradientPart(g[:, 0], at.get("bias"), a[:, 0], at["weight"])]
    return _weighted(seen, lambda some: a[some].mT.unsqueeze(1), g.mT.unsqueeze(1))


def _convolution(seen: HookedLayer) -> Parts:
    layer = cast(_ConvNd, seen.layer)
    pads = layer._reversed_padding_repeated_twice
    images, returned = [], []
    for x, g in seen.seen:
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


def _weighted(
    seen: HookedLayer, spread: Callable[[slice], torch.Tensor], g: torch.Tensor
) -> Parts:
    """Return the parts of a weight and its bias: sums of outer products over positions.

    Parameters
    ----------
    spread : callable (examples: slice) -> Tensor, shape (k', channels, p, t)
        The inputs at every one of t positions, in separate channels.
    g : Tensor, shape (k, channels, q, t)
    """
    weight, bias = seen.at.get("weight"), seen.at.get("bias")
    parts: Parts = []
    if bias is not None:
        parts.append(GradientPart(g.sum(dim=3).flatten(1), bias))
    if weight is not None:
        rows = seen.room((seen.count, weight.stop - weight.start))
        gradients = rows.view(*g.shape[:3], -1)
        step = max(1, _CACHED // (gradients[0, :, 0].numel() * g.shape[3]))
        for start in range(0, len(g), step):
            some = slice(start, start + step)
            torch.matmul(g[some], spread(some).mT, out=gradients[some])
        parts.append(GradientPart(rows, weight))
    return parts


def _norm(seen: HookedLayer) -> Parts:
    """Return the parts of a scale, by what it scales, and of a shift."""
    parts: Parts = []
    for name, at in seen.at.items():
        each = []
        for x, g in seen.seen:
            scaled = g * _normed(seen.layer, x) if name == "weight" else g
            scaled = scaled.to(seen.dtype)
            if isinstance(seen.layer, nn.GroupNorm):  # over places, then over images
                scaled = scaled.reshape(*g.shape[:2], -1).sum(dim=2)
            each.append(scaled.reshape(seen.count, -1, at.stop - at.start))
        parts.append(GradientPart(_joined(each, 1).sum(dim=1), at))
    return parts


def _normed(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if isinstance(layer, nn.GroupNorm):
        return functional.group_norm(x, layer.num_groups, eps=layer.eps)
    layer = cast(nn.LayerNorm, layer)
    return functional.layer_norm(x, list(layer.normalized_shape), eps=layer.eps)


def _embedding(seen: HookedLayer) -> Parts:
    layer = cast(nn.Embedding, seen.layer)
    entries = _joined([x.reshape(seen.count, -1) for x, _ in seen.seen], 1)
    # An example with others has a loss of NaN, and counts as zero.
    entries = entries.clamp(0, layer.num_embeddings - 1)
    g = seen.rows(1)
    if layer.padding_idx is not None:  # its row has no gradient
        g = g.masked_fill((entries == layer.padding_idx).unsqueeze(2), 0.0)
    return [TablePart(entries, g, layer.num_embeddings, seen.at["weight"])]


def _joined(uses: list[torch.Tensor], dim: int) -> torch.Tensor:
    return uses[0] if len(uses) == 1 else torch.cat(uses, dim)


FORMULAS: dict[object, Callable[[HookedLayer], Parts]] = {
    nn.Linear.forward: _linear,
    **dict.fromkeys(
        (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward), _convolution
    ),
    **dict.fromkeys((nn.GroupNorm.forward, nn.LayerNorm.forward), _norm),
    nn.Embedding.forward: _embedding,
}
