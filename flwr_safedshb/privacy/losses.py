"""Losses of examples, one value for each, and what cannot be one, in words."""

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

from flwr_safedshb.privacy.clipping.total_losses import TotalFunctions
from flwr_safedshb.privacy.datasets import Batch, tensors_of

Loss = Callable[..., torch.Tensor]
# Losses that compare an output with the target in the same place.
_ELEMENTWISE = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss),
    *(nn.BCELoss, nn.BCEWithLogitsLoss),
)
# Those that raise for some values.
_PARTIAL = (nn.BCELoss, nn.CrossEntropyLoss, nn.NLLLoss)
# Those of torch that give each row a value of its own.
_LOSSES = (*_ELEMENTWISE, nn.CrossEntropyLoss, nn.NLLLoss)
_FUNCTIONS = (
    *(functional.cross_entropy, functional.nll_loss, functional.binary_cross_entropy),
    *(functional.binary_cross_entropy_with_logits, functional.mse_loss),
    *(functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss),
)


class UnsupportedModelError(ValueError):
    """The model or loss has no per-example gradients that could be bounded."""


class PerExampleLoss:
    """A loss that returns a value per example.

    Parameters
    ----------
    loss : callable (outputs, targets) -> Tensor
        Either any callable that returns one value per example, such as
        ``functools.partial(F.cross_entropy, reduction="none")``, or a torch loss
        module with any reduction: the reduction over the batch is dropped, and that
        over an example's own values, of several labels or pixels, stays. Such a module
        gets the ``logits`` of what a model of Hugging Face returns.

    Attributes
    ----------
    elementary : bool
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
        self._loss = loss
        self.is_rowwise = is_rowwise_loss(loss)
        self._partial = not isinstance(loss, _Loss) or isinstance(loss, _PARTIAL)

    @property
    def function(self) -> Loss:
        """What computes the values."""
        return self._loss

    def own_objects(self) -> list[object]:
        """Return the objects of a loss that may hold state, and that a copy copies."""
        loss = self._loss
        if isinstance(loss, nn.Module):
            return [*loss.modules()]
        plain = isinstance(
            loss, FunctionType | MethodType | BuiltinFunctionType | functools.partial
        )
        return [] if plain or not hasattr(loss, "__dict__") else [loss]

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of a loss that is a module, which stay as they are."""
        loss = self._loss
        return [*loss.parameters()] if isinstance(loss, nn.Module) else []

    def buffers(self) -> list[torch.Tensor]:
        """Return the buffers of a loss that is a module."""
        loss = self._loss
        return [*loss.buffers()] if isinstance(loss, nn.Module) else []

    def __call__(self, outputs: Batch, targets: Batch) -> torch.Tensor:
        """Return the losses of k examples, (k,).

        Raises
        ------
        UnsupportedModelError
            If the loss does not give k values for k targets.
        """
        if isinstance(self._loss, _Loss):
            if not isinstance(outputs, torch.Tensor):
                outputs = getattr(outputs, "logits", outputs)
            _refuse_no_rows(self._loss, outputs, targets)
            _refuse_broadcasting(self._loss, outputs, targets)
        with TotalFunctions() if self._partial else nullcontext():
            values = self._loss(outputs, targets)
        count = _count(targets)
        if values.shape == (count,):
            return values
        several = values.numel() > count and values.shape[:1] == (count,)
        if several and self._reduce is not None:
            values = self._reduce(values.reshape(count, -1), dim=1)
        if values.shape[:1] != (count,) or values.numel() != count:
            raise UnsupportedModelError(
                "the loss must return one value per example, a tensor of shape (k,) "
                f"for k examples, got one with {values.dim()} axes; use "
                "reduction='none' and reduce what is left within each example"
            )
        return values.reshape(count)


def _count(targets: Batch) -> int:
    """Return how many examples there are; a nest may hold more than tensors."""
    first = targets if isinstance(targets, torch.Tensor) else tensors_of(targets)[0]
    return first.shape[0]


def is_rowwise_loss(loss: object) -> bool:
    """Say whether it is known that no value depends on another example."""
    if isinstance(loss, functools.partial):
        plain = not loss.args and loss.keywords == {"reduction": "none"}
        return loss.func in _FUNCTIONS and plain
    plain = isinstance(loss, _Loss) and "forward" not in vars(loss)
    return plain and type(loss) in _LOSSES and has_no_hooks(cast(_Loss, loss))


def _refuse_no_rows(loss: _Loss, outputs: Batch, targets: Batch) -> None:
    """Refuse what is no tensor with a row for each example, of torch's losses."""
    if not type(loss).__module__.startswith("torch.nn"):
        return
    if not isinstance(outputs, torch.Tensor):
        raise UnsupportedModelError(
            f"{type(loss).__name__} needs a tensor, and the model returns a "
            f"{type(outputs).__name__}; choose from it in a loss of your own, as in "
            "lambda o, y: F.cross_entropy(o[0], y, reduction='none')"
        )
    if outputs.shape[:1] != (_count(targets),):
        raise UnsupportedModelError(
            "the model must return a row for each example; squeeze() drops that axis "
            "where there is one example: name the axis to drop, as in squeeze(1)"
        )


def _refuse_broadcasting(loss: _Loss, outputs: Batch, targets: Batch) -> None:
    """Refuse shapes of which torch would compare each output with every target."""
    if not isinstance(loss, _ELEMENTWISE) or not isinstance(outputs, torch.Tensor):
        return
    if isinstance(targets, torch.Tensor) and outputs.shape != targets.shape:
        shapes = " and ".join(describe_shape(part) for part in (outputs, targets))
        raise UnsupportedModelError(
            f"{type(loss).__name__} needs outputs and targets of one shape, got "
            f"{shapes}; turn the targets by unsqueeze(1), or the outputs by squeeze(1)"
        )


def has_no_hooks(module: nn.Module) -> bool:
    """Say whether nothing is hooked to a module."""
    # A hook may replace a weight, what the module returns, or what comes back to it.
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return not any((*hooks, module._backward_hooks, module._backward_pre_hooks))


def describe_batch(batch: Batch) -> str:
    """Return types and shapes, with k for the number of examples."""
    if isinstance(batch, torch.Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {describe_shape(batch)}"
    if isinstance(batch, dict):
        parts = [f"{name}: {describe_batch(part)}" for name, part in batch.items()]
        return f"{{{', '.join(parts)}}}"
    if isinstance(batch, tuple | list):
        return f"[{', '.join(map(describe_batch, batch))}]"
    return type(batch).__name__


def describe_shape(tensor: torch.Tensor) -> str:
    """Return a shape, with k for the number of examples."""
    return f"({', '.join(['k', *map(str, tensor.shape[1:])])})"
