"""Opacus' per-example hooks, with the layers corrected where a bound depends on them.

Opacus finds per-example gradients, or only their norms, in hooks on the layers. Three
of its formulas are replaced here, because a norm that comes out too small lets an
example through unclipped:

- the ghost norm of a linear layer is computed in float64: in float32 the squares of
  small values vanish, and the sums over positions cancel;
- a linear layer on inputs with more than one position axis has a ghost norm at all;
- the row of an embedding's ``padding_idx`` has no gradient, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.embedding import (
    compute_embedding_grad_sample,
    compute_embedding_norm_sample,
)
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleModuleFastGradientClipping,
)
from opacus.grad_sample.linear import compute_linear_grad_sample
from torch import nn

from flwr_safedshb.privacy.clipping.parts import row_norms

Sampled = dict[torch.Tensor, torch.Tensor]  # keyed by parameter
Sampler = Callable[[nn.Module, list[torch.Tensor], torch.Tensor], Sampled]


def _linear_norms(
    layer: nn.Linear, activations: list[torch.Tensor], backprops: torch.Tensor
) -> Sampled:
    """Norms of ``backprops^T activations`` per example, not computing the product."""
    inputs, outputs = activations[0], backprops
    if outputs.dim() == 2:
        output_norms = torch.linalg.vector_norm(outputs.double(), dim=1)
        norms = {}
        if layer.weight.requires_grad:
            input_norms = torch.linalg.vector_norm(inputs.double(), dim=1)
            norms[layer.weight] = output_norms * input_norms
        if layer.bias is not None and layer.bias.requires_grad:
            norms[layer.bias] = output_norms
        return norms
    inputs, outputs = inputs.flatten(1, -2), outputs.flatten(1, -2)
    positions = outputs.shape[1]
    if 2 * positions**2 > layer.in_features * layer.out_features:
        gradients: Sampled = compute_linear_grad_sample(layer, [inputs], outputs)
        return {parameter: row_norms(g) for parameter, g in gradients.items()}
    inputs, outputs = inputs.double(), outputs.double()
    norms = {}
    if layer.weight.requires_grad:
        # ||sum_t g_t a_t^T||^2 = sum_st <g_s, g_t> <a_s, a_t>
        squares = (outputs @ outputs.mT * (inputs @ inputs.mT)).sum(dim=(1, 2))
        norms[layer.weight] = squares.clamp(min=0).sqrt()
    if layer.bias is not None and layer.bias.requires_grad:
        norms[layer.bias] = torch.linalg.vector_norm(outputs.sum(dim=1), dim=1)
    return norms


def _without_padding(sampler: Sampler) -> Sampler:
    def sample(
        layer: nn.Module, activations: list[torch.Tensor], backprops: torch.Tensor
    ) -> Sampled:
        padding = getattr(layer, "padding_idx", None)
        if padding is not None:
            is_padding = (activations[0] == padding).unsqueeze(-1)
            backprops = backprops.masked_fill(is_padding, 0.0)
        return sampler(layer, activations, backprops)

    return sample


_GRADIENTS = {
    **GradSampleModule.GRAD_SAMPLERS,
    nn.Embedding: _without_padding(compute_embedding_grad_sample),
}


class PerExampleModule(GradSampleModule):  # type: ignore[misc]  # untyped base
    """Leaves every example's gradient in ``parameter.grad_sample``."""

    GRAD_SAMPLERS: ClassVar = _GRADIENTS


class GhostModule(GradSampleModuleFastGradientClipping):  # type: ignore[misc]
    """Leaves every example's gradient norm in ``parameter._norm_sample``."""

    GRAD_SAMPLERS: ClassVar = _GRADIENTS
    NORM_SAMPLERS: ClassVar = {
        nn.Linear: _linear_norms,
        nn.Embedding: _without_padding(compute_embedding_norm_sample),
    }
