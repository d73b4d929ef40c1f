"""Refuse models and losses that carry values from one example to another.

They are tried on made-up examples, of ordinary and of hostile sizes, with weights that
no server chose. What no trial can see is state outside the model that made-up examples
do not bring to light, such as a global variable that changes at the hundredth call.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import nn

from flwr_safedshb.privacy.bad_examples import ignore_failure, silence_log
from flwr_safedshb.privacy.batches import (
    Batch,
    Example,
    concat_batches,
    copy_batch,
    index_batch,
)
from flwr_safedshb.privacy.clipping.backward import PerExampleBackward, call_model
from flwr_safedshb.privacy.clipping.clipped_sum import MAX_CLIP, clip_and_sum
from flwr_safedshb.privacy.clipping.fingerprint import fingerprint_shared_state
from flwr_safedshb.privacy.clipping.made_up_examples import COUNT, EACH, scale_examples
from flwr_safedshb.privacy.clipping.total_functions import TotalFunctions
from flwr_safedshb.privacy.losses import PerExampleLoss, UnsupportedModelError

SEED = 20
# Sizes of made-up examples, none of which a model may remember.
_SIZES = (1.0, 1e-30, 0.0, 1e3, 1e30, math.inf)
_DEPENDS = (
    "an example's gradient depends on examples before it or beside it: the model or "
    "the loss keeps values outside itself, in a class, a global variable or a closure; "
    "keep them in local variables"
)


def refuse_state(
    trial: nn.Module, loss: PerExampleLoss, dtype: torch.dtype, examples: Example
) -> None:
    """Refuse a model or a loss that mixes examples, or remembers any of them.

    Parameters
    ----------
    trial : nn.Module
        In training mode, with weights of its own.
    loss, dtype
        See `PerExampleBackward`.
    examples : (inputs, targets)
        Made up.
    """
    still = copy.deepcopy(trial).eval()
    training = PerExampleBackward(copy.deepcopy(trial), loss, dtype)
    evaluation = PerExampleBackward(copy.deepcopy(still), loss, dtype)
    before = fingerprint_shared_state(trial, loss.function)
    _refuse_mixing(still, loss, examples)
    _refuse_memory(lambda *example: training.compute_gradient(*example)[0], examples)
    _refuse_memory(lambda *example: _compute_loss(evaluation, *example), examples)
    _refuse_own_state(training, examples)
    after = fingerprint_shared_state(trial, loss.function)
    for name, value in before.items():
        if value != after.get(name, value):
            raise UnsupportedModelError(
                f"{name} changes while the model is used, and would carry values of "
                "one example to others; keep them in local variables"
            )


def _refuse_mixing(module: nn.Module, loss: PerExampleLoss, examples: Example) -> None:
    """Refuse if the losses of a batch are not those that each example has alone.

    Examples are kept apart here in any case: such a model would not train as its
    author meant.
    """
    inputs, targets = examples
    alone = [
        loss(
            call_model(module, copy_batch(index_batch(inputs, one))),
            index_batch(targets, one),
        )
        for one in EACH
    ]
    together = loss(call_model(module, copy_batch(inputs)), targets)
    if not are_close(together.unsqueeze(1), torch.cat(alone).unsqueeze(1)):
        raise UnsupportedModelError(
            "the model or the loss mixes the examples of a batch: their losses are not "
            "those that each example has alone; keep every layer to one example, as "
            "recurrent ones do with batch_first=True"
        )


def _refuse_memory(
    compute: Callable[[Batch, Batch], torch.Tensor], examples: Example
) -> None:
    """Refuse if the values of an example change once others have been computed."""

    def compute_example(place: int, size: float = 1.0) -> torch.Tensor:
        torch.manual_seed(SEED)
        inputs, targets = scale_examples(examples, size)
        one = EACH[place]
        return compute(index_batch(inputs, one), index_batch(targets, one))

    first = compute_example(0)
    for size in _SIZES:
        with ignore_failure():
            compute_example(1, size)
        if not _have_same_bits(first, compute_example(0)):
            raise UnsupportedModelError(_DEPENDS)


def _compute_loss(
    path: PerExampleBackward, inputs: Batch, targets: Batch
) -> torch.Tensor:
    """Return the loss of an example as an evaluation computes it, without gradients."""
    module, loss, _ = path.make_copy()
    with torch.no_grad(), TotalFunctions():
        outputs = call_model(module, copy_batch(inputs))
        return loss(outputs, copy_batch(targets)).detach()


def _refuse_own_state(path: PerExampleBackward, examples: Example) -> None:
    """Refuse a model or a loss that changes its own tensors while it trains."""
    for weight_scale, example_scale in (
        (1.0, 1.0),
        (1.0, 1e3),
        (1e3, 1e30),
        (1.0, math.inf),
    ):
        with torch.no_grad():
            for parameter in path.parameters:
                parameter.mul_(weight_scale)
        before = _list_tensors(path.module, path.loss)
        module, loss, _ = path.make_copy()
        inputs, targets = map(copy_batch, scale_examples(examples, example_scale))
        with ignore_failure():
            loss(call_model(module, inputs), targets)
        after = _list_tensors(module, loss)
        for name, tensor in before.items():
            if name in after and not _have_same_bits(tensor, after[name]):
                raise UnsupportedModelError(
                    f"{name} changes while the model trains, and would carry one "
                    "example's values to others; keep no statistics or caches of "
                    "examples there, or freeze the layer by its eval()"
                )


def _list_tensors(module: nn.Module, loss: PerExampleLoss) -> dict[str, torch.Tensor]:
    """Return all tensors of a model and its loss, by a description of each."""
    tensors: dict[str, object] = {}
    tensors |= {f"the parameter {name}": p for name, p in module.named_parameters()}
    tensors |= {f"the buffer {name}": b for name, b in module.named_buffers()}
    for name, layer in module.named_modules():
        of = f" of {name}" if name else ""
        tensors |= {f"the attribute {key}{of}": v for key, v in vars(layer).items()}
    for owner in loss.list_objects():
        tensors |= {f"the loss's {key}": value for key, value in vars(owner).items()}
    return {k: v.detach() for k, v in tensors.items() if isinstance(v, torch.Tensor)}


def refuse_neighbours(path: PerExampleBackward, examples: Example) -> None:
    """Refuse a pass in which an example's gradient depends on those beside it.

    The first place has the same example and the same random numbers in every batch.
    """
    expected: torch.Tensor | None = None
    for size in (1.0, 1e30, math.inf, 1.0):
        batch = [
            concat_batches(
                [index_batch(own, slice(0, 1)), index_batch(other, slice(1, COUNT))]
            )
            for own, other in zip(examples, scale_examples(examples, size), strict=True)
        ]
        torch.manual_seed(SEED)
        with silence_log():
            parts, losses = path.run(copy_batch(batch[0]), copy_batch(batch[1]))
        if not parts:
            return
        shape = COUNT, 1, sum(p.numel() for p in path.slices)
        usable = losses.isfinite()
        found = clip_and_sum(parts, shape, MAX_CLIP, path.dtype, usable)[0]
        if expected is not None and not _have_same_bits(expected, found):
            raise UnsupportedModelError(_DEPENDS)
        expected = found


def _have_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal, where NaN equals NaN."""
    return one.shape == other.shape and bool(
        torch.isclose(one, other, rtol=0.0, atol=0.0, equal_nan=True).all()
    )


def are_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether rows are equal up to the rounding of deep models; (k, d) each."""
    tolerance = max(1e-2, torch.finfo(found.dtype).eps ** 0.5)
    gap = torch.linalg.vector_norm(found - expected, dim=1)
    size = torch.linalg.vector_norm(expected, dim=1)
    return bool((gap <= tolerance * (size + 1e-3 * size.max())).all())
