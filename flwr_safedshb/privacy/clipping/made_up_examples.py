"""Made-up examples: what models are tried on, so that no private example takes part."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from flwr_safedshb.privacy.batches import (
    Batch,
    Example,
    describe_batch,
    index_batch,
    map_tensors,
)
from flwr_safedshb.privacy.clipping.backward import PerExampleBackward
from flwr_safedshb.privacy.losses import UnsupportedModelError
from flwr_safedshb.stop_signal import reraise_stop

# Enough to see that one does not depend on another.
COUNT = 3
EACH = [slice(i, i + 1) for i in range(COUNT)]
# Characters of an error's text.
_MAX_TEXT = 100


def find_usable_examples(
    alone: PerExampleBackward, like: Example, with_remedy: bool = True
) -> tuple[Example, torch.Tensor]:
    """Make up examples that model and loss can take.

    Returns
    -------
    (inputs, targets), Tensor of shape (COUNT, d)
        The examples, and the gradient of each.

    Raises
    ------
    UnsupportedModelError
        If model or loss fails on all that were tried; names what would help.
    """
    failure: BaseException | None = None
    for words, classes in itertools.product((10, 2, 1), (10, 3, 2, 1)):
        examples = (
            _draw_like(like[0], words),
            _draw_like(like[1], classes, targets=True),
        )
        try:
            pairs = [
                alone.compute_gradient(*(index_batch(part, one) for part in examples))
                for one in EACH
            ]
            gradients = torch.stack([gradient for gradient, _ in pairs])
            if gradients.isfinite().all() and all(v.isfinite() for _, v in pairs):
                return examples, gradients
            failure = ArithmeticError("the loss or the gradient is not finite")
        except UnsupportedModelError:
            raise
        except BaseException as error:
            reraise_stop(error)
            failure = error
    assert failure is not None
    remedies = _find_remedies(alone, like) if with_remedy else []
    raise describe_failure(failure, like, remedies) from failure


def _draw_like(like: Batch, bound: int, targets: bool = False) -> Batch:
    """Draw examples of given shapes and types; whole numbers are below `bound`."""

    def draw(tensor: torch.Tensor) -> torch.Tensor:
        shape = (COUNT, *tensor.shape[1:])
        if not tensor.is_floating_point():
            values = torch.randint(bound, shape)
        else:
            values = torch.rand(shape) if targets else torch.randn(shape)
        return values.to(tensor.device, tensor.dtype)

    return map_tensors(draw, like)


def scale_examples(examples: Example, size: float) -> Example:
    """Multiply examples by `size`.

    Whole numbers stay as they are up to 1000, and then become values that no label has.
    """

    def scale(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            return tensor * size
        if tensor.dtype == torch.bool or size <= 1000.0:
            return tensor
        odd = -1 if size == math.inf else torch.iinfo(tensor.dtype).max
        return torch.full_like(tensor, odd)

    return map_tensors(scale, examples[0]), map_tensors(scale, examples[1])


def _find_remedies(alone: PerExampleBackward, like: Example) -> list[str]:
    """Return changes of the data with which model and loss work, found by trying."""
    inputs, targets = _draw_like(like[0], 1), _draw_like(like[1], 1)
    weights = next(p.dtype for p in alone.module.parameters() if p.requires_grad)
    word = str(weights).removeprefix("torch.")
    changes: list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = [
        ("", lambda tensor: tensor),
        (f"make the {{}} {word}, as the weights are", lambda t: t.to(weights)),
        ("make the {} int64, as losses want classes", lambda t: t.long()),
        (
            "make the {} int64 (k), by squeeze(1), as losses want classes",
            lambda t: t.reshape(len(t)).long(),
        ),
    ]
    for (one, first), (two, second) in itertools.product(changes[:2], changes):
        with suppress(Exception):
            changed = map_tensors(first, inputs), map_tensors(second, targets)
            find_usable_examples(alone, changed, with_remedy=False)
            remedies = one.format("inputs"), two.format("targets")
            return [remedy for remedy in remedies if remedy]
    return ["leave out by unpack= what it does not take"] * isinstance(like[0], dict)


def describe_failure(
    error: BaseException, like: Example, remedies: Sequence[str] = ()
) -> UnsupportedModelError:
    """Return an error that says what failed on made-up examples, and the remedies."""
    if isinstance(error, UnsupportedModelError):
        return error
    parts = [
        "the model or the loss fails on made-up examples like the data, inputs "
        f"{describe_batch(like[0])} and targets {describe_batch(like[1])}",
        *remedies,
        f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_TEXT]}",
    ]
    return UnsupportedModelError("; ".join(parts))
