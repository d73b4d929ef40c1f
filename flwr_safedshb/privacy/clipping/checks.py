"""Whether a model and a loss have per-example gradients; asked before round 1."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.loss import _Loss

from flwr_safedshb.privacy.clipping.layers import LayerChain

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class UnsupportedModelError(ValueError):
    """The model or loss has no per-example gradients that could be bounded."""


def check_model(model: nn.Module) -> None:
    """Refuse a model that mixes examples or has layers without per-example gradients.

    Raises
    ------
    UnsupportedModelError
        With Opacus' explanation, and its remedy where it has one.
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise UnsupportedModelError("the model has no parameter with requires_grad")
    problems = [] if LayerChain.fits(model) else _opacus_problems(model)
    for module in model.modules():
        # Opacus looks at trainable layers of the exact types only; a batch norm mixes
        # examples without weights of its own too.
        if isinstance(module, _BatchNorm) and not problems:
            from opacus.validators.batch_norm import validate

            problems += [str(error) for error in validate(module)]
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (
            module.scale_grad_by_freq or module.max_norm is not None or module.sparse
        ):
            problems.append(
                "an embedding with scale_grad_by_freq, max_norm or sparse has no "
                "per-example gradient; turn these options off"
            )
        if isinstance(module, _ConvNd) and _pads_otherwise(module):
            problems.append(
                f"a convolution with padding_mode={module.padding_mode!r} has its "
                "gradients taken as if it padded with zeros; use "
                "padding_mode='zeros', or pad in a layer before it (nn.CircularPad2d, "
                "nn.ReflectionPad2d, nn.ReplicationPad2d)"
            )
    if problems:
        raise UnsupportedModelError(
            "the model cannot be trained privately: "
            + "; ".join(dict.fromkeys(problems))
            + ". opacus.validators.ModuleValidator.fix(model) replaces the layers it "
            "knows a private substitute for"
        )


def _opacus_problems(model: nn.Module) -> list[str]:
    # Opacus is slow to import, and has nothing to say about layers with a formula.
    from opacus.validators import ModuleValidator

    from flwr_safedshb.privacy.clipping.hooks import PerExampleModule

    training = copy.copy(model)  # shares everything but the flag that Opacus asks for
    training.training = True
    errors = [*ModuleValidator.validate(training), *PerExampleModule.validate(training)]
    return [str(error) for error in errors]


def _pads_otherwise(layer: _ConvNd) -> bool:
    """Say if a weight is trained on inputs padded with other values than zeros.

    Opacus' formulas pad with zeros whatever the mode is: both paths would clip by the
    norm of another gradient.
    """
    pads = layer.padding != "valid" and any(layer.padding)
    return layer.padding_mode != "zeros" and pads and layer.weight.requires_grad


def per_example_loss(loss: Loss) -> Loss:
    """Turn a loss into one that returns a value per example.

    Parameters
    ----------
    loss : callable (outputs, targets) -> Tensor
        Either any callable that returns one value per example, such as
        ``functools.partial(F.cross_entropy, reduction="none")``, or a torch loss
        module with any reduction: the reduction over the batch is dropped.

    Returns
    -------
    callable (outputs, targets) -> Tensor of shape (k,)
        Raises `UnsupportedModelError` if the loss does not give k values for k targets.
    """
    if isinstance(loss, _Loss) and loss.reduction != "none":
        weighted = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)
        if isinstance(loss, nn.CTCLoss) or (
            weighted and getattr(loss, "weight", None) is not None
        ):
            raise UnsupportedModelError(
                f"{type(loss).__name__} with reduction={loss.reduction!r} divides by a "
                "sum over the batch, which mixes examples; use reduction='none'"
            )
        loss = copy.copy(loss)
        loss.reduction = "none"

    def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        values = loss(outputs, targets)
        count = targets.shape[0]
        if values.shape[:1] != (count,) or values.numel() != count:
            raise UnsupportedModelError(
                "the loss must return one value per example, a tensor of shape (k,) "
                f"for k examples, got one with {values.dim()} axes; use "
                "reduction='none' and reduce what is left within each example"
            )
        return values.reshape(count)

    return losses
