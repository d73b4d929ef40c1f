"""Batches of examples, the loss of each, and what becomes of those without.

A batch is a tensor with examples on the first axis, or a nest of such tensors.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias, cast

import torch
from torch import nn
from torch.nn.modules.loss import _Loss

from flwr_safedshb.privacy.clipping.known import elementary

Batch: TypeAlias = "torch.Tensor | Sequence[Batch] | Mapping[str, Batch]"
Keywords: TypeAlias = "dict[str, Batch]"
# Shape of an example, without the first axis, and type of every tensor of a batch.
Spec: TypeAlias = tuple[tuple[tuple[int, ...], torch.dtype], ...]
Loss = Callable[..., torch.Tensor]
_logger = logging.getLogger(__name__)
_shown: ContextVar[bool] = ContextVar("shown", default=False)
# Losses that compare an output with the target in the same place.
_ELEMENTWISE = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss),
    *(nn.BCELoss, nn.BCEWithLogitsLoss),
)
# Characters of an error's text.
_LONG = 300


def mapped(function: Callable[[torch.Tensor], torch.Tensor], batch: Batch) -> Batch:
    """Return the batch with a function of every tensor in its place."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {name: mapped(function, part) for name, part in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(mapped(function, part) for part in batch)
    return cast(Batch, batch)  # what a model returns beside tensors


def leaves(*batches: Batch) -> list[torch.Tensor]:
    """Return the tensors of batches."""
    found: list[torch.Tensor] = []
    for batch in batches:
        if isinstance(batch, torch.Tensor):
            found.append(batch)
        elif isinstance(batch, dict | tuple | list):
            found += leaves(*(batch.values() if isinstance(batch, dict) else batch))
    return found


def spec(*batches: Batch) -> Spec:
    """Return shapes and types, which say nothing about values."""
    return tuple((tuple(t.shape[1:]), t.dtype) for t in leaves(*batches))


def rows(batch: Batch, which: torch.Tensor | slice) -> Batch:
    """Return some examples of a batch."""
    if isinstance(which, slice):
        return mapped(lambda tensor: tensor[which], batch)
    # Twice as fast as an index.
    return mapped(lambda t: t.index_select(0, which.to(t.device)), batch)


def arguments(module: nn.Module, inputs: Batch) -> tuple[tuple[Batch, ...], Keywords]:
    """Return how a model is called: a dict as keywords, where it takes such keywords.

    Everything else is its one argument.
    """
    if isinstance(inputs, dict):
        try:
            inspect.signature(module.forward).bind(**inputs)
        except TypeError:
            return (inputs,), {}
        return (), inputs
    return (inputs,), {}


def as_batch(one: Batch) -> Batch:
    """Return an example as a batch of one."""
    return mapped(lambda tensor: tensor.unsqueeze(0), one)


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
        reduce: Callable[..., torch.Tensor] | None = None
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
            reduce = torch.sum if loss.reduction == "sum" else torch.mean
            loss = copy.copy(loss)
            loss.reduction = "none"
        self._loss = loss
        self._reduce = reduce
        self.elementary = elementary(loss)

    def __call__(self, outputs: Batch, targets: Batch) -> torch.Tensor:
        """Return the losses of k examples, (k,).

        Raises
        ------
        UnsupportedModelError
            If the loss does not give k values for k targets.
        """
        if isinstance(self._loss, _Loss):
            outputs = getattr(outputs, "logits", outputs)
            _refuse_broadcasting(self._loss, outputs, targets)
        values = self._loss(outputs, targets)
        count = leaves(targets)[0].shape[0]
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

    def each(self, outputs: Batch, targets: Batch) -> torch.Tensor:
        """Return the same, and let no value depend on another example."""
        if self.elementary:
            return self(outputs, targets)
        return torch.vmap(self._one)(outputs, targets)

    def _one(self, outputs: Batch, targets: Batch) -> torch.Tensor:
        return self(as_batch(outputs), as_batch(targets)).squeeze(0)


def _refuse_broadcasting(loss: _Loss, outputs: Batch, targets: Batch) -> None:
    """Refuse shapes of which torch would compare each output with every target."""
    if not isinstance(loss, _ELEMENTWISE) or not isinstance(outputs, torch.Tensor):
        return
    if isinstance(targets, torch.Tensor) and outputs.shape != targets.shape:
        shapes = " and ".join(shape_in_words(part) for part in (outputs, targets))
        raise UnsupportedModelError(
            f"{type(loss).__name__} needs outputs and targets of one shape, got "
            f"{shapes}; turn the targets by unsqueeze(1), or the outputs by squeeze(1)"
        )


def shape_in_words(tensor: torch.Tensor) -> str:
    """Return a shape, with k for the number of examples."""
    return f"({', '.join(['k', *map(str, tensor.shape[1:])])})"


def log_unusable(count: int, error: Exception) -> None:
    """Write to this node's log that examples count as zero, and why.

    The text of an error may quote the data: it is there for those who look closer, and
    where causes are shown.
    """
    what = type(error).__name__
    if _shown.get():
        what += f": {' '.join(str(error).split())[:_LONG]}"
    _logger.warning("%d examples cannot be used and count as zero: %s", count, what)
    _logger.debug("Why they cannot be used", exc_info=error)


@contextmanager
def causes_shown(shown: bool = True) -> Iterator[None]:
    """Let logs have the texts of errors, which may quote the data.

    For the data's owner, and for simulations: their noise comes from a seed, and
    protects nobody.
    """
    before = _shown.set(shown or _shown.get())
    try:
        yield
    finally:
        _shown.reset(before)
