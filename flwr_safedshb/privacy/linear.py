"""Clipped sums in closed form, for chains of linear layers.

The gradient of one example is the outer product of what goes into a layer, a, and what
comes back to it, g: its norm is |g| sqrt(|a|^2 + 1) with a bias, and the clipped sum is
one matrix product for each layer. No example's gradient is ever formed, and one
backward pass is enough.
"""

from __future__ import annotations

import torch
from torch import nn


class UnexpectedInputError(Exception):
    """The closed form does not cover what a layer was given."""


class LinearChain:
    """Per-example clipping for a model that `fits`.

    Parameters
    ----------
    module : nn.Module
        A copy of the model that may get hooks.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._seen: list[tuple[nn.Linear, torch.Tensor, torch.Tensor]] = []
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(self._see)

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
        seen, self._seen = self._seen, []
        seen = [layer for layer in seen if _trained(layer[0])]
        if any(inputs.dim() != 2 for _, inputs, _ in seen):
            raise UnexpectedInputError
        returned = torch.autograd.grad(losses.sum(), [output for *_, output in seen])
        pairs = [(i.detach(), g) for (_, i, _), g in zip(seen, returned, strict=True)]
        squares = torch.zeros(len(losses), dtype=torch.float64, device=losses.device)
        for (layer, *_), (inputs, g) in zip(seen, pairs, strict=True):
            size = torch.zeros_like(squares)
            if layer.weight.requires_grad:
                size += inputs.double().square().sum(dim=1)
            if layer.bias is not None and layer.bias.requires_grad:
                size += 1.0
            squares += g.double().square().sum(dim=1) * size
        norms = squares.sqrt()
        factors = (clip_norm / norms).clamp(max=1.0)
        # C/inf is 0 and C/nan compares as false; zero times either would not be zero.
        kept = factors > 0
        if not kept.all():
            pairs = [(inputs[kept], g[kept]) for inputs, g in pairs]
            factors = factors[kept]
        sums: dict[int, torch.Tensor] = {}
        for (layer, *_), (inputs, g) in zip(seen, pairs, strict=True):
            weighted = g * factors.to(g.dtype).unsqueeze(1)
            sums[id(layer.weight)] = weighted.T @ inputs
            if layer.bias is not None:
                sums[id(layer.bias)] = weighted.sum(dim=0)
        trained = [p for p in self._module.parameters() if p.requires_grad]
        return [sums[id(p)] for p in trained], norms

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Pass examples through the module."""
        self._seen = []
        outputs: torch.Tensor = self._module(inputs)
        return outputs

    def _see(
        self, layer: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor
    ) -> None:
        assert isinstance(layer, nn.Linear)
        self._seen.append((layer, inputs[0], output))


def _plain(module: nn.Module) -> bool:
    if type(module).forward in (nn.Sequential.forward, nn.Linear.forward):
        return True
    bare = not module._parameters and not module._modules
    return bare and not getattr(module, "inplace", False)


def _trained(layer: nn.Linear) -> bool:
    return any(p.requires_grad for p in layer.parameters())
