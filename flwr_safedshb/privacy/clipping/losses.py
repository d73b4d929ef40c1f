"""A loss that has one value for each example, and what becomes of those without."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.loss import _Loss

from flwr_safedshb.privacy.clipping.batches import Batch, leaves
from flwr_safedshb.privacy.clipping.known import elementary

Loss = Callable[..., torch.Tensor]
_logger = logging.getLogger(__name__)


class UnsupportedModelError(ValueError):
    """The model or loss has no per-example gradients that could be bounded."""


class PerExampleLoss:
    """A loss that returns a value per example.

    Parameters
    ----------
    loss : callable (outputs, targets) -> Tensor
        Either any callable that returns one value per example, such as
        ``functools.partial(F.cross_entropy, reduction="none")``, or a torch loss
        module with any reduction: the reduction over the batch is dropped.

    Attributes
    ----------
    elementary : bool
        Whether it is known that no value depends on another example.
    """

    def __init__(self, loss: Loss) -> None:
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
            loss = copy.copy(loss)
            loss.reduction = "none"
        self._loss = loss
        self.elementary = elementary(loss)

    def __call__(self, outputs: Batch, targets: Batch) -> torch.Tensor:
        """Return the losses of k examples, (k,).

        Raises
        ------
        UnsupportedModelError
            If the loss does not give k values for k targets.
        """
        values = self._loss(outputs, targets)
        count = leaves(targets)[0].shape[0]
        if values.shape[:1] != (count,) or values.numel() != count:
            raise UnsupportedModelError(
                "the loss must return one value per example, a tensor of shape (k,) "
                f"for k examples, got one with {values.dim()} axes; use "
                "reduction='none' and reduce what is left within each example"
            )
        return values.reshape(count)


def log_unusable(count: int, error: Exception) -> None:
    """Write to this node's log that examples count as zero, and why.

    The text of an error may quote the data: it is there for those who look closer.
    """
    what = type(error).__name__
    _logger.warning("%d examples cannot be used and count as zero: %s", count, what)
    _logger.debug("Why they cannot be used", exc_info=error)
