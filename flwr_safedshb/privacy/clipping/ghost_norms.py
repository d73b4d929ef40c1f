"""Per-example gradients of layers by a formula, from their inputs and output gradients.

A layer with a formula is hooked: it works on all k examples at once, also where
`torch.vmap` lets the model see one at a time, and its inputs are kept with the edge of
its outputs in the graph. The formula combines every use of the layer: its inputs, and
the gradients g of the losses for its outputs. Their first axis is that of the k
examples, or a multiple of it where a layer was given several images of each. It
returns the parts (`clipped_sum`) of the layer's parameters.
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
from flwr_safedshb.privacy.clipping.total_functions import TotalFunctions

# Elements that are worked on at a time: few, so that they stay in the cache.
_CACHED = 2**18
Parts = list[GradientPart | TablePart]


class _VmapEscape(torch.autograd.Function):
    """Call a function on the tensors under `torch.vmap`, with all examples at once."""

    @staticmethod
    def forward(*_: object) -> torch.Tensor:
        raise RuntimeError("a hooked layer was called outside of a pass")

    @staticmethod
    def setup_context(*_: object) -> None:
        """Keep nothing: what the function does is differentiated by itself."""

    @staticmethod
    def vmap(
        info: Any,  # torch's own, without a public name
        in_dims: tuple[int | None, ...],
        inputs: torch.Tensor,
        token: torch.Tensor,
        function: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, int]:
        if in_dims[0] is None:  # the same for all examples, as positions often are
            return function(inputs.expand(info.batch_size, *inputs.shape)), 0
        return function(inputs.movedim(in_dims[0], 0)), 0


class HookedLayer:
    """A layer whose calls are recorded, and memory for its gradients.

    Parameters
    ----------
    layer : nn.Module
    slices : mapping from trained parameters to slices
        Where they are in the sum.
    dtype : torch.dtype
        Of the sum.
    vmap_tokens : list of Tensor
        Under `torch.vmap`, a tensor of one example, by which vmap recognises itself.

    Attributes
    ----------
    uses : list of (inputs, edge of the outputs in the graph)
        Of the last pass; to be emptied before another.
    gradients : list of (inputs, g)
        Of the uses that a loss depends on, by k examples (`count`).
    per_owner : int
        How many examples of the pass are one of these k: more than 1 where persons are
        the unit, whose examples are then positions of one.
    """

    def __init__(
        self,
        layer: nn.Module,
        slices: Mapping[nn.Parameter, slice],
        dtype: torch.dtype,
        vmap_tokens: list[torch.Tensor],
    ) -> None:
        self.layer, self.dtype, self._vmap_tokens = layer, dtype, vmap_tokens
        own = layer.named_parameters(recurse=False)
        self.slices = {name: slices[p] for name, p in own if p in slices}
        self.uses: list[tuple[torch.Tensor, GradientEdge]] = []
        self.gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.count, self.per_owner = 0, 1
        self._memory = cast(torch.Tensor, layer.weight).new_empty(0, dtype=dtype)
        layer.forward = self._make_forward()

    def pop_parts(
        self, count: int, found: list[torch.Tensor | None], per_owner: int = 1
    ) -> Parts:
        """Return the parameters' gradients; pops g of every use off the end of `found`.

        The uses are forgotten: their memory is free for the next layer.
        """
        self.count, self.per_owner = count, per_owner
        for inputs, _ in reversed(self.uses):
            if (g := found.pop()) is not None:
                self.gradients.append((inputs, g))
        self.uses.clear()
        try:
            return FORMULAS[type(self.layer).forward](self) if self.gradients else []
        finally:
            self.gradients.clear()

    def join_uses(self, which: int) -> torch.Tensor:
        """Return the inputs (0) or g (1) of all uses as (k, t, ...), t positions."""
        found = [use[which].to(self.dtype) for use in self.gradients]
        return _concat_uses([x.reshape(self.count, -1, x.shape[-1]) for x in found], 1)

    def get_memory(self, shape: tuple[int, int]) -> torch.Tensor:
        """Return memory that is kept: to allocate it costs more than to fill it."""
        if len(self._memory) < math.prod(shape):
            self._memory = self._memory.new_empty(math.prod(shape))
        return self._memory[: math.prod(shape)].view(shape)

    def _make_forward(self) -> Callable[[torch.Tensor], torch.Tensor]:
        own = type(self.layer).forward
        # Only this formula raises for some values; under vmap a guard that is entered
        # around the model does not reach here.
        is_table = isinstance(self.layer, nn.Embedding)
        guard: type[AbstractContextManager[object]] = (
            TotalFunctions if is_table else nullcontext
        )

        def call(inputs: torch.Tensor) -> torch.Tensor:
            with guard():
                outputs: torch.Tensor = own(self.layer, inputs)
            # The edge, and not the output, which may be overwritten in place.
            self.uses.append((inputs.detach(), get_gradient_edge(outputs)))
            return outputs

        def call_on_all(inputs: torch.Tensor) -> torch.Tensor:
            if not _needs_folding(self.layer, inputs):
                return call(inputs)
            outputs = call(inputs.flatten(0, 1))
            return outputs.view(*inputs.shape[:2], *outputs.shape[1:])

        def forward(input: torch.Tensor) -> torch.Tensor:  # torch's name
            if not self._vmap_tokens:
                return call(input)
            escape = cast(Any, _VmapEscape).apply
            outputs = escape(input, self._vmap_tokens[0], call_on_all)
            return cast(torch.Tensor, outputs)

        return forward


def _needs_folding(layer: nn.Module, inputs: torch.Tensor) -> bool:
    """Return whether a layer that takes one axis of examples was given two."""
    if isinstance(layer, _ConvNd):
        return inputs.dim() == 3 + len(layer.kernel_size)
    return isinstance(layer, nn.GroupNorm)


def _compute_linear(hooked: HookedLayer) -> Parts:
    a, g, at = hooked.join_uses(0), hooked.join_uses(1), hooked.slices
    rows, p, q = a.shape[1], a.shape[2], g.shape[2]
    # A position: two vectors are enough. Of a person: some pairs of vectors.
    few = rows == 1 or (hooked.per_owner > 1 and rows**2 * (p + q) <= p * q)
    if few and "weight" in at:
        pairs = g.flatten(0, 1), at.get("bias"), a.flatten(0, 1), at["weight"]
        return [GradientPart(*pairs, rows)]
    if rows == hooked.per_owner and len(at) == 2:  # the same, in fewer operations
        weight = GradientPart(torch.bmm(g.mT, a).flatten(1), at["weight"])
        return [weight, GradientPart(g.sum(dim=1), at["bias"])]
    return _compute_weight_and_bias(
        hooked, lambda rows: a[rows].mT.unsqueeze(1), g.mT.unsqueeze(1)
    )


def _compute_convolution(hooked: HookedLayer) -> Parts:
    layer = cast(_ConvNd, hooked.layer)
    pads = layer._reversed_padding_repeated_twice
    images, gradients = [], []
    for x, g in hooked.gradients:
        padded = functional.pad(x.to(hooked.dtype), pads)
        images.append(padded.reshape(hooked.count, -1, *padded.shape[1:]))
        # (k, images, channels, places) -> (k, groups, q, positions)
        back = g.to(hooked.dtype).reshape(hooked.count, -1, g.shape[1], g[0, 0].numel())
        shape = hooked.count, layer.groups, g.shape[1] // layer.groups, -1
        gradients.append(back.transpose(1, 2).reshape(shape))
    return _compute_weight_and_bias(
        hooked,
        lambda rows: _concat_uses([_unfold_windows(layer, x[rows]) for x in images], 3),
        _concat_uses(gradients, 3),
    )


def _unfold_windows(layer: _ConvNd, images: torch.Tensor) -> torch.Tensor:
    """Return the inputs of each output of a convolution, (k, groups, p, t).

    Parameters
    ----------
    images : Tensor, shape (k, images, channels, ...)
    """
    axes = range(len(layer.kernel_size))
    windows = images
    for i in axes:
        width = layer.dilation[i] * (layer.kernel_size[i] - 1) + 1
        windows = windows.unfold(3 + i, width, layer.stride[i])[
            ..., :: layer.dilation[i]
        ]
    kernel = [3 + len(axes) + i for i in axes]
    ordered = windows.permute(0, 2, *kernel, 1, *(3 + i for i in axes))
    positions = ordered.shape[2 + len(axes) :].numel()
    return ordered.reshape(len(images), layer.groups, -1, positions)


def _compute_weight_and_bias(
    hooked: HookedLayer, spread: Callable[[slice], torch.Tensor], g: torch.Tensor
) -> Parts:
    """Compute a weight and its bias: sums of outer products over positions.

    Parameters
    ----------
    spread : callable (examples: slice) -> Tensor, shape (k', channels, p, t)
        The inputs at every one of t positions, in separate channels.
    g : Tensor, shape (k, channels, q, t)
    """
    weight, bias = hooked.slices.get("weight"), hooked.slices.get("bias")
    parts: Parts = []
    if bias is not None:
        parts.append(GradientPart(g.sum(dim=3).flatten(1), bias))
    if weight is not None:
        rows = hooked.get_memory((hooked.count, weight.stop - weight.start))
        gradients = rows.view(*g.shape[:3], -1)
        step = max(1, _CACHED // (gradients[0, :, 0].numel() * g.shape[3]))
        for start in range(0, len(g), step):
            examples = slice(start, start + step)
            inputs = spread(examples)
            torch.matmul(g[examples], inputs.mT, out=gradients[examples])
        parts.append(GradientPart(rows, weight))
    return parts


def _compute_norm(hooked: HookedLayer) -> Parts:
    """Compute a scale, by the normalized inputs, and a shift."""
    parts: Parts = []
    for name, at in hooked.slices.items():
        each = []
        for x, g in hooked.gradients:
            scaled = g * _normalize(hooked.layer, x) if name == "weight" else g
            scaled = scaled.to(hooked.dtype)
            if isinstance(hooked.layer, nn.GroupNorm):  # over places, then over images
                scaled = scaled.reshape(*g.shape[:2], -1).sum(dim=2)
            each.append(scaled.reshape(hooked.count, -1, at.stop - at.start))
        parts.append(GradientPart(_concat_uses(each, 1).sum(dim=1), at))
    return parts


def _normalize(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if isinstance(layer, nn.GroupNorm):
        return functional.group_norm(x, layer.num_groups, eps=layer.eps)
    layer = cast(nn.LayerNorm, layer)
    return functional.layer_norm(x, list(layer.normalized_shape), eps=layer.eps)


def _compute_embedding(hooked: HookedLayer) -> Parts:
    layer = cast(nn.Embedding, hooked.layer)
    entries = _concat_uses(
        [x.reshape(hooked.count, -1) for x, _ in hooked.gradients], 1
    )
    # An example with other entries has a loss of NaN, and counts as zero.
    entries = entries.clamp(0, layer.num_embeddings - 1)
    g = hooked.join_uses(1)
    if layer.padding_idx is not None:  # its row has no gradient
        g = g.masked_fill((entries == layer.padding_idx).unsqueeze(2), 0.0)
    return [TablePart(entries, g, layer.num_embeddings, hooked.slices["weight"])]


def _concat_uses(uses: list[torch.Tensor], dim: int) -> torch.Tensor:
    return uses[0] if len(uses) == 1 else torch.cat(uses, dim)


FORMULAS: dict[object, Callable[[HookedLayer], Parts]] = {
    nn.Linear.forward: _compute_linear,
    **dict.fromkeys(
        (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward), _compute_convolution
    ),
    **dict.fromkeys((nn.GroupNorm.forward, nn.LayerNorm.forward), _compute_norm),
    nn.Embedding.forward: _compute_embedding,
}
