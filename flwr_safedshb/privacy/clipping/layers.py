"""Clipped sums in one backward pass, for models of well-known layers.

What goes into a layer and what comes back to it determine every example's gradient. So
one backward pass is enough: it gives the norms, and the clipped sum is then a weighted
product for each parameter (`formulas`), without a second pass.

What is summed is what the norms were taken of. So the bound of an example's
contribution holds whatever a model does between its layers.
"""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from flwr_safedshb.privacy.clipping.formulas import FORMULAS
from flwr_safedshb.privacy.clipping.linear import UnexpectedInputError
from flwr_safedshb.privacy.clipping.parts import Part, Rooms


class _Pass(NamedTuple):
    """A layer, its input, and where in the graph its output was made."""

    layer: nn.Module
    inputs: torch.Tensor
    version: int
    output: GradientEdge


class LayerChain:
    """Per-example clipping for a model that `fits`.

    Parameters
    ----------
    module : nn.Module
        A copy of the model that may get hooks.
    """

    holds: ClassVar = False  # no example's whole gradient

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._rooms = Rooms()
        self._layers = [m for m in module.modules() if _trained(m)]
        self._seen: list[_Pass | None] = []
        for layer in self._layers:
            layer.register_forward_hook(self._see, with_kwargs=True)

    @staticmethod
    def fits(model: nn.Module) -> bool:
        """Say whether all that is trained belongs to one layer with a formula each."""
        layers = [m for m in model.modules() if _trained(m)]
        weights = [
            id(p) for m in layers for p in m._parameters.values() if p is not None
        ]
        return len({*weights}) == len(weights) and all(map(_known, layers))

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Pass examples through the module."""
        self._seen = []
        outputs: torch.Tensor = self._module(inputs)
        return outputs

    def clipped_sum(
        self, losses: torch.Tensor, clip_norm: float
    ) -> tuple[list[torch.Tensor] | None, torch.Tensor]:
        """Return the sums for the trained parameters, and each gradient's norm, (k,).

        No sums if one of the norms is not finite: zero times such a gradient would not
        be zero, so that example must not take part.

        Parameters
        ----------
        losses : Tensor of shape (k,)
            Of the examples that were just passed through the module.
        clip_norm : float
            C.

        Raises
        ------
        UnexpectedInputError
            If a layer was used twice or not at all, if examples are not on the first
            axis of its input, or if that was overwritten.
        """
        pairs = self._backward(losses)
        parts: dict[int, Part] = {}
        each = []
        for layer in reversed(self._layers):
            # Parts of one layer after the other, so that what they do not need is free
            # for the next.
            inputs, g = pairs.pop()
            formula = FORMULAS[type(layer).forward]
            for name, part in formula(layer, inputs, g, self._rooms).items():
                parts[id(layer._parameters[name])] = part
                each.append(part.norms())
        norms: torch.Tensor = torch.linalg.vector_norm(torch.stack(each), dim=0)
        if not math.isfinite(norms.sum()):
            return None, norms
        factors = (clip_norm / norms).clamp_(max=1.0)
        sums = [parts[id(p)].weighted(factors).view_as(p) for p in self._trained]
        return sums, norms

    def _backward(
        self, losses: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return what went into each layer and what came back, k rows each."""
        passes = {id(seen.layer): seen for seen in self._seen if seen is not None}
        once = len(self._seen) == len(passes) == len(self._layers)
        self._seen = []
        if not once:
            raise UnexpectedInputError
        ordered = [passes[id(layer)] for layer in self._layers]
        edges = [seen.output for seen in ordered]
        returned = torch.autograd.grad(losses.sum(), edges, allow_unused=True)
        for seen, g in zip(ordered, returned, strict=True):
            if g is None or not len(seen.inputs) == len(g) == len(losses):
                raise UnexpectedInputError
            if seen.inputs._version != seen.version:
                raise UnexpectedInputError
        return [(s.inputs.detach(), g) for s, g in zip(ordered, returned, strict=True)]

    def _see(
        self,
        layer: nn.Module,
        positional: tuple[torch.Tensor, ...],
        named: dict[str, torch.Tensor],
        output: torch.Tensor,
    ) -> None:
        inputs = (*positional, *named.values())
        if len(inputs) != 1 or not output.requires_grad:
            self._seen.append(None)
            return
        # The edge, and not the output: a layer that works in place may overwrite that.
        edge = get_gradient_edge(output)
        self._seen.append(_Pass(layer, inputs[0], inputs[0]._version, edge))


def _trained(module: nn.Module) -> bool:
    weights = module._parameters.values()
    return any(p is not None and p.requires_grad for p in weights)


def _known(layer: nn.Module) -> bool:
    return (
        type(layer).forward in FORMULAS
        and layer._parameters.keys() <= {"weight", "bias"}
        and getattr(layer, "padding_mode", "zeros") == "zeros"
        # They may replace a weight, or what the layer returns.
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
    )
