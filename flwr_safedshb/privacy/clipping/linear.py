"""Clipped sums in closed form, for chains of linear layers.

The gradient of one example is the outer product of what goes into a layer, a, and what
comes back to it, g: its norm is |g| sqrt(|a|^2 + 1) with a bias, and the clipped sum is
one matrix product for each layer. No example's gradient is ever formed, and one
backward pass is enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

Vector = npt.NDArray[np.float64]


class UnexpectedInputError(Exception):
    """The closed form does not cover what a layer was given."""


class LinearChain:
    """Per-example clipping for a model that `fits`.

    Parameters
    ----------
    module : nn.Module
        A copy of the model, in training mode.
    """

    holds: ClassVar = False  # no example's whole gradient

    def __init__(self, module: nn.Module) -> None:
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._leaves = [leaf for leaf in module.modules() if not leaf._modules]
        self._seen: list[tuple[nn.Linear, torch.Tensor, torch.Tensor]] = []

    @staticmethod
    def fits(model: nn.Module) -> bool:
        """Say whether all that is trained are linear layers, each used once.

        Only plain layers and plain sequences of them: a forward of the user's own may
        use a weight in more ways than its layer shows, and a layer that works in place
        overwrites what the one before it has returned.
        """
        modules = [m for _, m in model.named_modules(remove_duplicate=False)]
        weights = [w for m in modules for w in m._parameters.values() if w is not None]
        if len({*modules}) < len(modules) or len({*map(id, weights)}) < len(weights):
            return False
        return all(map(_plain, modules))

    def clipped_sum(
        self, losses: torch.Tensor, clip_norm: float
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the sums for the trained parameters, and each gradient's norm, (k,).

        Parameters
        ----------
        losses : Tensor of shape (k,)
            Of the examples that were just passed through the module.
        clip_norm : float
            C.
        """
        layers, inputs, returned = self.backward(losses)
        norms = torch.from_numpy(_norms(layers, inputs, returned))
        factors, kept = clip_factors(norms.to(losses.device), clip_norm)
        if kept is not None:
            inputs = [a[kept] for a in inputs]
            returned = [g[kept] for g in returned]
        return self.sums(layers, inputs, returned, factors), norms

    def grouped_sums(
        self, losses: torch.Tensor, clip_norm: float, groups: int
    ) -> list[torch.Tensor]:
        """Return the sums of each of `groups` equal parts of a batch, (groups, ...)."""
        layers, inputs, returned = self.backward(losses)
        norms = _norms(layers, inputs, returned)
        factors = _factors(norms, clip_norm)
        finite = np.isfinite(norms)
        sums: dict[int, torch.Tensor] = {}
        for layer, inward, back in zip(layers, inputs, returned, strict=True):
            a, g = inward.cpu().numpy(), back.cpu().numpy()
            if not finite.all():  # zero times infinity is not zero
                a, g = (np.where(finite[:, None], part, 0.0) for part in (a, g))
            weighted = g * factors.astype(g.dtype)[:, None]
            weighted = weighted.reshape(groups, -1, g.shape[1])
            if layer.weight.requires_grad:
                parts = a.reshape(groups, -1, a.shape[1])
                total = weighted.transpose(0, 2, 1) @ parts
                sums[id(layer.weight)] = torch.from_numpy(total)
            if layer.bias is not None and layer.bias.requires_grad:
                sums[id(layer.bias)] = torch.from_numpy(weighted.sum(axis=1))
        return [sums[id(p)] for p in self._trained]

    def backward(
        self, losses: torch.Tensor
    ) -> tuple[list[nn.Linear], list[torch.Tensor], list[torch.Tensor]]:
        """Return the layers, what went into each, (k, p), what came back, (k, q)."""
        seen, self._seen = self._seen, []
        if any(inputs.dim() != 2 for _, inputs, _ in seen):
            raise UnexpectedInputError
        layers, inputs, outputs = zip(*seen, strict=True)
        returned = torch.autograd.grad(losses, outputs, torch.ones_like(losses))
        return list(layers), [a.detach() for a in inputs], list(returned)

    def sums(
        self,
        layers: Sequence[nn.Linear],
        inputs: Sequence[torch.Tensor],
        returned: Sequence[torch.Tensor],
        factors: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Return the sums of the gradients, each times its factor, by parameter."""
        sums: dict[int, torch.Tensor] = {}
        for layer, a, g in zip(layers, inputs, returned, strict=True):
            weighted = g * factors.to(g.dtype).unsqueeze(1)
            if layer.weight.requires_grad:
                sums[id(layer.weight)] = weighted.T @ a
            if layer.bias is not None and layer.bias.requires_grad:
                sums[id(layer.bias)] = weighted.sum(dim=0)
        return [sums[id(p)] for p in self._trained]

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Pass examples through the layers."""
        self._seen = []
        for leaf in self._leaves:
            if type(leaf).forward is not nn.Linear.forward:
                inputs = leaf(inputs)
                continue
            assert isinstance(leaf, nn.Linear)
            # No graph for the weights: what comes back to the outputs is enough.
            bias = None if leaf.bias is None else leaf.bias.detach()
            outputs = functional.linear(inputs, leaf.weight.detach(), bias)
            if _trained(leaf):
                if not outputs.requires_grad:
                    outputs.requires_grad_()
                self._seen.append((leaf, inputs, outputs))
            inputs = outputs
        return inputs


def clip_factors(
    norms: torch.Tensor, clip_norm: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return min(1, C/norm) for every example that takes part, and which do.

    Parameters
    ----------
    norms : Tensor of float64, shape (k,)
    clip_norm : float
        C.

    Returns
    -------
    factors : Tensor, shape (k',)
    kept : Tensor of bool, shape (k,), or None
        None if all take part. An example whose norm is not finite does not: zero times
        its gradient would not be zero.
    """
    values = norms.cpu().numpy()
    kept = None
    if not math.isfinite(values.sum()):
        finite = np.isfinite(values)
        values, kept = values[finite], torch.from_numpy(finite).to(norms.device)
    return torch.from_numpy(_factors(values, clip_norm)).to(norms.device), kept


def _factors(norms: Vector, clip_norm: float) -> Vector:
    factors = np.ones_like(norms)
    np.divide(clip_norm, norms, out=factors, where=norms > clip_norm)
    return factors


# Numpy's calls take a third of torch's, and simulated models are small.
def _norms(
    layers: Sequence[nn.Linear],
    inputs: Sequence[torch.Tensor],
    returned: Sequence[torch.Tensor],
) -> Vector:
    """Return the norm of each example's whole gradient, (k,)."""
    total: Vector | None = None
    for layer, a, g in zip(layers, inputs, returned, strict=True):
        part = _row_norms(g)
        if layer.weight.requires_grad:
            size = _row_norms(a)
            if layer.bias is not None and layer.bias.requires_grad:
                size = np.hypot(size, 1.0)
            part *= size
        total = part if total is None else np.hypot(total, part)
    assert total is not None
    return total


def _row_norms(rows: torch.Tensor) -> Vector:
    # In float64: in float32 squares of small values vanish.
    if rows.device.type == "cpu" and rows.dtype == torch.float32:
        wide = rows.detach().numpy().astype(np.float64)
        norms: Vector = np.sqrt(np.einsum("ij,ij->i", wide, wide))
        return norms
    found = torch.linalg.vector_norm(rows.detach().double(), dim=1)
    return cast(Vector, found.cpu().numpy())


def _plain(module: nn.Module) -> bool:
    if module._forward_hooks or module._forward_pre_hooks:
        return False  # They may replace a weight, or what the layer returns.
    if type(module).forward is nn.Linear.forward:
        return module._parameters.keys() == {"weight", "bias"}
    if type(module).forward is nn.Sequential.forward:
        return True
    bare = not module._parameters and not module._modules
    return bare and not getattr(module, "inplace", False)


def _trained(layer: nn.Linear) -> bool:
    bias = layer.bias is not None and layer.bias.requires_grad
    return layer.weight.requires_grad or bias
