"""Per-example losses, and the refusal of losses that mix examples."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import cast

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.loss import _Loss

from flwr_safedshb.privacy.batches import Batch, count_examples, describe_shape
from flwr_safedshb.privacy.clipping.total_functions import TotalFunctions

Loss = Callable[..., torch.Tensor]
# Losses that compare each output with the target at the same index.
_ELEMENTWISE = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss),
    *(nn.BCELoss, nn.BCEWithLogitsLoss),
)
# Losses that raise for some values, and so need `TotalFunctions`.
_RAISING = (nn.BCELoss, nn.CrossEntropyLoss, nn.NLLLoss)
# Losses whose value for a row depends on no other row.
_ROWWISE_MODULES = (*_ELEMENTWISE, nn.CrossEntropyLoss, nn.NLLLoss)
_ROWWISE_FUNCTIONS = (
    *(functional.cross_entropy, functional.nll_loss, functional.binary_cross_entropy),
    *(functional.binary_cross_entropy_with_logits, functional.mse_loss),
    *(functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss),
)


class UnsupportedModelError(ValueError):
    """The model or the loss has no bounded per-example gradients."""


class PerExampleLoss:
    """A loss that returns one value per example.

    Parameters
    ----------
    loss : callable (outputs, targets) -> Tensor
        Either a callable that returns one value per example, such as
        ``functools.partial(F.cross_entropy, reduction="none")``, or a torch loss
        module with any reduction: the reduction over the batch is dropped, and that
        over the values of one example, such as several labels or pixels, stays. For a
        Hugging Face model such a module is given the ``logits`` of the output.

    Attributes
    ----------
    function : callable
        Computes the values before the reduction over each example.
    is_rowwise : bool
        Whether it is known that no value depends on another example.
    """

    def __init__(self, loss: Loss) -> None:
        self._reduce: Callable[..., torch.Tensor] | None = None
        if isinstance(loss, _Loss) and loss.reduction != "none":
            weighted = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)
            if isinstance(loss, nn.CTCLoss) or (
                weighted and getattr(loss, "weight", None) is not None
            ):
                raise UnsupportedModelError(
                    f"{type(loss).__name__} with reduction={loss.reduction!r} divides "
                    "by a sum over the batch, which mixes examples; use "
                    "reduction='none'"
                )
            self._reduce = torch.sum if loss.reduction == "sum" else torch.mean
            loss = copy.copy(loss)
            loss.reduction = "none"
        self.function = loss
        self.is_rowwise = is_rowwise_loss(loss)
        self._may_raise = not isinstance(loss, _Loss) or isinstance(loss, _RAISING)

    def list_objects(self) -> list[object]:
        """Return the objects of the loss that may hold state."""
        loss = self.function
        if isinstance(loss, nn.Module):
            return [*loss.modules()]
        # Copying does not duplicate these, so they are not listed.
        shared = (FunctionType, MethodType, BuiltinFunctionType, functools.partial)
        stateful = hasattr(loss, "__dict__") and not isinstance(loss, shared)
        return [loss] if stateful else []

    def list_tensors(self) -> list[torch.Tensor]:
        """Return the parameters and buffers of a loss that is a module."""
        loss = self.function
        if not isinstance(loss, nn.Module):
            return []
        return [*loss.parameters(), *loss.buffers()]

    def __call__(self, outputs: Batch, targets: Batch) -> torch.Tensor:
        """Return the losses of k examples, (k,).

        Raises
        ------
        UnsupportedModelError
            If the loss does not give k values for k targets.
        """
        if isinstance(self.function, _Loss):
            if not isinstance(outputs, torch.Tensor):
                outputs = getattr(outputs, "logits", outputs)
            _refuse_outputs_without_rows(self.function, outputs, targets)
            _refuse_broadcasting(self.function, outputs, targets)
        with TotalFunctions() if self._may_raise else nullcontext():
            values = self.function(outputs, targets)
        count = count_examples(targets)
        if values.shape == (count,):
            return values
        several = values.numel() > count and values.shape[:1] == (count,)
        if several and self._reduce is not None:
            values = self._reduce(values.reshape(count, -1), dim=1)
        if values.shape[:1] != (count,) or values.numel() != count:
            raise UnsupportedModelError(
                "the loss must return one value per example, a tensor of shape (k,) "
                f"for k examples, got one with {values.dim()} axes; use "
                "reduction='none' and reduce the other axes within each example"
            )
        return values.reshape(count)


def is_rowwise_loss(loss: object) -> bool:
    """Return whether it is known that no value depends on another example."""
    if isinstance(loss, functools.partial):
        plain = not loss.args and loss.keywords == {"reduction": "none"}
        return loss.func in _ROWWISE_FUNCTIONS and plain
    plain = isinstance(loss, _Loss) and "forward" not in vars(loss)
    return plain and type(loss) in _ROWWISE_MODULES and has_no_hooks(cast(_Loss, loss))


def _refuse_outputs_without_rows(loss: _Loss, outputs: Batch, targets: Batch) -> None:
    """Refuse outputs without one row for each example, for a loss of torch."""
    if not type(loss).__module__.startswith("torch.nn"):
        return
    if not isinstance(outputs, torch.Tensor):
        raise UnsupportedModelError(
            f"{type(loss).__name__} needs a tensor, and the model returns a "
            f"{type(outputs).__name__}; select the tensor in a loss of your own, as in "
            "lambda o, y: F.cross_entropy(o[0], y, reduction='none')"
        )
    if outputs.shape[:1] != (count_examples(targets),):
        raise UnsupportedModelError(
            "the model must return a row for each example; squeeze() drops that axis "
            "where there is one example: name the axis to drop, as in squeeze(1)"
        )


def _refuse_broadcasting(loss: _Loss, outputs: Batch, targets: Batch) -> None:
    """Refuse shapes that torch would broadcast: every output with every target."""
    if not isinstance(loss, _ELEMENTWISE) or not isinstance(outputs, torch.Tensor):
        return
    if isinstance(targets, torch.Tensor) and outputs.shape != targets.shape:
        shapes = " and ".join(describe_shape(part) for part in (outputs, targets))
        raise UnsupportedModelError(
            f"{type(loss).__name__} needs outputs and targets of one shape, got "
            f"{shapes}; turn the targets by unsqueeze(1), or the outputs by squeeze(1)"
        )


def has_no_hooks(module: nn.Module) -> bool:
    """Return whether no hook is registered on a module."""
    # A hook may replace a weight, the output or the gradient of a module.
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return not any((*hooks, module._backward_hooks, module._backward_pre_hooks))
