"""Forward passes of torch that are known to keep examples apart."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from flwr_safedshb.privacy.clipping.ghost_norms import FORMULAS
from flwr_safedshb.privacy.losses import has_no_hooks

# Layers without weights that treat every row of the first axis by itself.
_ROWWISE = frozenset(
    layer.forward
    for layer in (
        *(nn.Identity, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Softplus),
        *(nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Dropout, nn.Dropout1d, nn.Dropout2d),
        *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
        *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
        *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    )
)
# Attributes that a subclass of one of these may define.
_HARMLESS = {
    *("__init__", "__module__", "__doc__", "__annotations__", "__constants__"),
    *("__annotate__", "__annotate_func__", "__parameters__", "extra_repr"),
    # Python 3.13 puts these two into every class.
    *("__static_attributes__", "__firstlineno__"),
}


def is_rowwise(model: nn.Module) -> bool:
    """Return whether a model is a sequence of layers that treat every row by itself.

    Only torch's own forward passes count, without hooks or parametrisations: a forward
    of the user's own may do anything.
    """
    return all(map(_is_rowwise_layer, model.modules()))


def has_formula(layer: nn.Module) -> bool:
    """Return whether a formula gives the gradients of a layer (`ghost_norms`)."""
    return (
        type(layer).forward in FORMULAS
        and _inherits_unchanged(type(layer))
        and not _is_patched(layer)
        # The layer does not own a weight that is computed from others.
        and {"weight"} <= layer._parameters.keys() <= {"weight", "bias"}
        and getattr(layer, "padding_mode", "zeros") == "zeros"
        and has_no_hooks(layer)
    )


def takes_rows(layer: nn.Module, inputs: torch.Tensor) -> bool:
    """Return whether a layer with a formula has the examples on its first axis."""
    if isinstance(layer, _ConvNd):
        return inputs.dim() == 2 + len(layer.kernel_size)
    if isinstance(layer, nn.LayerNorm):
        return inputs.dim() > len(layer.normalized_shape)
    return inputs.dim() > 1 or not isinstance(layer, nn.Linear)


def _is_rowwise_layer(module: nn.Module) -> bool:
    kind = type(module)
    if not _inherits_unchanged(kind) or not has_no_hooks(module) or _is_patched(module):
        return False
    if kind.forward is nn.Sequential.forward:
        return True
    if kind.forward is nn.Flatten.forward:
        return bool(vars(module)["start_dim"] == 1)
    if module._modules:
        return False
    return kind.forward in _ROWWISE or has_formula(module)


def _is_patched(module: nn.Module) -> bool:
    """Return whether a method of a module's class is replaced on the module itself."""
    return any(callable(getattr(type(module), name, None)) for name in vars(module))


def _inherits_unchanged(kind: type) -> bool:
    """Return whether a class overrides nothing of torch's, such as ``__call__``."""
    own = [each for each in kind.__mro__[:-1] if not _is_of_torch(each)]
    theirs = next(filter(_is_of_torch, kind.__mro__))
    return not any(
        hasattr(theirs, name) and name not in _HARMLESS
        for each in own
        for name in vars(each)
    )


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.startswith("torch.nn.modules.")
