"""What goes into the layers of a model in a pass, and what comes back to them.

A layer with a formula (`formulas`) is watched: it works on all k examples at once, also
where `torch.vmap` lets the model see one at a time, and its inputs are kept with the
place of its outputs in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.conv import _ConvNd

Uses = list[tuple[torch.Tensor, torch.Tensor]]  # what went in, and what came back


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
            inputs = inputs.expand(info.batch_size, *inputs.shape)
        else:
            inputs = inputs.movedim(in_dims[0], 0)
        return function(inputs), 0


class Watch:
    """Watches layers of a model.

    Attributes
    ----------
    layers : list of nn.Module
    ticket : Tensor, or None
        Under `torch.vmap`, a tensor of one example, by which vmap knows itself.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers, self.ticket = layers, cast("torch.Tensor | None", None)
        for layer in layers:
            layer.forward = self._watched(layer)
        self.clear()

    def clear(self) -> None:
        """Forget what was seen."""
        self._uses: dict[nn.Module, list[tuple[torch.Tensor, GradientEdge]]]
        self._uses = {layer: [] for layer in self.layers}

    def ignore_unused(self) -> None:
        """Watch those layers no longer that the last pass did not call."""
        for layer in self.layers:
            if not self._uses[layer]:
                del layer.forward
        self.layers = [layer for layer in self.layers if self._uses[layer]]

    def outputs(self) -> list[GradientEdge]:
        """Return where all outputs are in the graph, layer by layer."""
        return [use[1] for layer in self.layers for use in self._uses[layer]]

    def pairs(
        self, gradients: list[torch.Tensor | None]
    ) -> Iterator[tuple[nn.Module, Uses]]:
        """Yield the layers that a loss depends on with their uses, the last first.

        What was yielded is let go, and its memory free for the next.

        Parameters
        ----------
        gradients : list of Tensor or None
            Those of `outputs`; it is emptied.
        """
        for layer in reversed(self.layers):
            uses: Uses = []
            for inputs, _ in reversed(self._uses.pop(layer)):
                g = gradients.pop()
                if g is not None:
                    uses.append((inputs, g))
            if uses:
                yield layer, uses

    def _watched(self, layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        own = type(layer).forward

        def see(inputs: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = own(layer, inputs)
            # The edge, and not the output, which may be overwritten in place.
            use = inputs.detach(), get_gradient_edge(outputs)
            self._uses[layer].append(use)
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
