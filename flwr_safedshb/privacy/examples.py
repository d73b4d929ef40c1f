"""A client's examples: batches, the loss of each, and what becomes of those without.

A batch is a tensor with examples on the first axis, or a nest of such tensors: dicts,
lists and tuples, as `torch.vmap` takes them.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.loss import _Loss
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only
from torch.utils.data import Dataset

Batch: TypeAlias = "torch.Tensor | Sequence[Batch] | Mapping[str, Batch]"
# How a nest is built; of every tensor the shape, without the first axis, and type.
Spec: TypeAlias = tuple[object, ...]
Example = tuple[Batch, Batch]
# Batches, which those who hand them in know better.
Data = Dataset[Any] | tuple[Any, Any]
Loss = Callable[..., torch.Tensor]
_logger = logging.getLogger(__name__)
_shown: ContextVar[bool] = ContextVar("shown", default=False)
# Losses that compare an output with the target in the same place.
_ELEMENTWISE = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss),
    *(nn.BCELoss, nn.BCEWithLogitsLoss),
)
# Those of torch that give each row a value of its own.
_LOSSES = (*_ELEMENTWISE, nn.CrossEntropyLoss, nn.NLLLoss)
_FUNCTIONS = (
    *(functional.cross_entropy, functional.nll_loss, functional.binary_cross_entropy),
    *(functional.binary_cross_entropy_with_logits, functional.mse_loss),
    *(functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss),
)
_interned: dict[object, Loss] = {}
# Characters of an error's text.
_LONG = 300


def tensors_of(*batches: Batch) -> list[torch.Tensor]:
    """Return the tensors of batches; a nest may hold other things beside them."""
    if all(isinstance(batch, torch.Tensor) for batch in batches):
        return cast(list[torch.Tensor], list(batches))
    return [leaf for leaf in tree_leaves(batches) if isinstance(leaf, torch.Tensor)]


def spec(*batches: Batch) -> Spec:
    """Return how batches are built, shapes and types, which say nothing of values."""
    found, structure = tree_flatten(batches)
    kinds = [
        (tuple(leaf.shape[1:]), leaf.dtype) if torch.is_tensor(leaf) else type(leaf)
        for leaf in found
    ]
    return str(structure), *kinds


def rows(batch: Batch, which: torch.Tensor | slice) -> Batch:
    """Return some examples of a batch."""

    def some(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(which, slice):
            return tensor[which]
        # Twice as fast as an index.
        return tensor.index_select(0, which.to(tensor.device))

    return _of_tensors(some, batch)


def joined(batches: Sequence[Batch]) -> Batch:
    """Return one batch of all examples, which have the same `spec`."""
    return cast(
        Batch,
        tree_map(
            lambda *parts: torch.cat(parts) if torch.is_tensor(parts[0]) else parts[0],
            *batches,
        ),
    )


def as_batch(one: Batch) -> Batch:
    """Return an example as a batch of one."""
    return _of_tensors(lambda tensor: tensor.unsqueeze(0), one)


def _of_tensors(
    function: Callable[[torch.Tensor], torch.Tensor], batch: Batch
) -> Batch:
    """Return a batch with the value of a function in the place of each tensor."""
    # torch's own way through a nest takes longer than most of what is done there.
    if isinstance(batch, torch.Tensor):
        return function(batch)
    return cast(Batch, tree_map_only(torch.Tensor, function, batch))


def in_words(batch: Batch) -> str:
    """Return types and shapes, with k for the number of examples."""
    if isinstance(batch, torch.Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {shape_in_words(batch)}"
    if isinstance(batch, dict):
        parts = [f"{name}: {in_words(part)}" for name, part in batch.items()]
        return f"{{{', '.join(parts)}}}"
    if isinstance(batch, tuple | list):
        return f"[{', '.join(map(in_words, batch))}]"
    return type(batch).__name__


def shape_in_words(tensor: torch.Tensor) -> str:
    """Return a shape, with k for the number of examples."""
    return f"({', '.join(['k', *map(str, tensor.shape[1:])])})"


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
        self._elementary = _elementary(loss)

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
        values = self._loss(outputs, targets)
        count = tensors_of(targets)[0].shape[0]
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

    def each(self, outputs: Batch, targets: Batch) -> torch.Tensor:
        """Return the same, and let no value depend on another example."""
        if self._elementary:
            return self(outputs, targets)
        return torch.vmap(self.one)(outputs, targets)

    def one(self, outputs: Batch, targets: Batch) -> torch.Tensor:
        """Return the loss of one example, which has no axis of examples."""
        return self(as_batch(outputs), as_batch(targets)).squeeze(0)


def _elementary(loss: object) -> bool:
    """Say whether it is known that no value depends on another example."""
    if isinstance(loss, functools.partial):
        plain = not loss.args and loss.keywords == {"reduction": "none"}
        return loss.func in _FUNCTIONS and plain
    return isinstance(loss, _Loss) and type(loss) in _LOSSES and unhooked(loss)


def interned(loss: Loss) -> Loss:
    """Return one object for equal losses of torch, and any other loss as it is.

    Apps make them anew for every message, and what was checked is the very object.
    """
    if isinstance(loss, functools.partial) or not _elementary(loss):
        return loss
    module = cast(nn.Module, loss)
    if any(weight is not None for weight in module._buffers.values()):
        return loss
    told = {name: v for name, v in vars(module).items() if not name.startswith("_")}
    # A copy: the app may change its own.
    return _interned.setdefault((type(module), *told.items()), copy.copy(loss))


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
    if outputs.shape[:1] != tensors_of(targets)[0].shape[:1]:
        raise UnsupportedModelError(
            "the model must return a row for each example; squeeze() drops that axis "
            "where there is one example: name the axis to drop, as in squeeze(1)"
        )


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


def unhooked(module: nn.Module) -> bool:
    """Say whether nothing is hooked to a module."""
    # A hook may replace a weight, what the module returns, or what comes back to it.
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return not any((*hooks, module._backward_hooks, module._backward_pre_hooks))


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
