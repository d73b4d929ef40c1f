"""Decide before round 1 whether a model and a loss can be trained privately, and how.

No private example and no weight of a server takes part: models are tried on made-up
examples of the data's shapes and types, with random weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from flwr_safedshb.privacy.batches import (
    Batch,
    Example,
    Spec,
    copy_batch,
    count_examples,
    get_spec,
    index_batch,
    tensors_of,
)
from flwr_safedshb.privacy.clipping.backward import (
    BatchedBackward,
    PerExampleBackward,
    call_model,
)
from flwr_safedshb.privacy.clipping.clipped_sum import MAX_CLIP, clip_and_sum
from flwr_safedshb.privacy.clipping.fingerprint import Fingerprint, make_fingerprint
from flwr_safedshb.privacy.clipping.isolation import (
    SEED,
    are_close,
    refuse_neighbours,
    refuse_state,
)
from flwr_safedshb.privacy.clipping.made_up_examples import (
    COUNT,
    EACH,
    describe_failure,
    find_usable_examples,
)
from flwr_safedshb.privacy.clipping.total_functions import (
    TotalFunctions,
    find_partial_operation,
    is_unchecked,
)
from flwr_safedshb.privacy.losses import Loss, PerExampleLoss, UnsupportedModelError
from flwr_safedshb.stop_signal import reraise_stop

# Several, because a process may simulate several clients.
_MAX_CACHED = 8
_cache_lock = Lock()
_backward_cache: dict[tuple[Fingerprint, Spec, torch.dtype], PerExampleBackward] = {}


def check_model(
    model: nn.Module,
    loss: Loss | None = None,
    like: Example | None = None,
) -> None:
    """Refuse a model that cannot be trained privately.

    Its layers are inspected. With `loss` and `like`, or where a model of Hugging Face
    declares its inputs, it is also tried on made-up examples.

    Parameters
    ----------
    model : nn.Module
    loss : callable, optional
        See `PerExampleLoss`.
    like : (inputs, targets), optional
        A batch, of which only shapes and types are looked at.

    Raises
    ------
    UnsupportedModelError
        With the remedy.
    """
    refuse_global_hooks()
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise UnsupportedModelError("the model has no parameter with requires_grad")
    if any(p.is_complex() for p in trained):
        raise UnsupportedModelError("the model has complex parameters")
    problems = dict.fromkeys(filter(None, map(_find_problem, model.modules())))
    if problems:
        raise UnsupportedModelError(
            "the model cannot be trained privately: " + "; ".join(problems)
        )
    dummy_inputs = getattr(model, "dummy_inputs", None)
    # Hugging Face has words as dummy inputs even of models of images or sounds.
    main_input = getattr(model, "main_input_name", None)
    if like is None and isinstance(dummy_inputs, dict):
        like = dummy_inputs, torch.zeros(count_examples(dummy_inputs))
        loss = _sum_first_output if main_input in (None, *dummy_inputs) else None
    if like is not None and loss is not None:
        find_backward(model, PerExampleLoss(loss), like, trained[0].dtype)


def _find_problem(layer: nn.Module) -> str:
    """Return why a layer cannot be trained privately, with the remedy; or ""."""
    if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
        return (
            f"{type(layer).__name__} mixes the examples of a batch; use GroupNorm "
            "(opacus.validators.ModuleValidator.fix(model) puts it in), or freeze "
            "the layer by its eval()"
        )
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and (
        layer.scale_grad_by_freq or layer.max_norm is not None or layer.sparse
    ):
        return (
            "an embedding with scale_grad_by_freq, max_norm or sparse has no "
            "per-example gradient; turn these options off"
        )
    return ""


def refuse_global_hooks() -> None:
    """Refuse to work under hooks on all modules, which see every example of a batch."""
    if nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        raise UnsupportedModelError(
            "a hook is registered on all modules of the process, which could carry one "
            "example's values to another; remove it before training"
        )


def _sum_first_output(outputs: Batch, targets: torch.Tensor) -> torch.Tensor:
    """Stand in for a loss that is not known yet."""
    return tensors_of(outputs)[0].flatten(1).sum(1)


def find_backward(
    model: nn.Module, loss: PerExampleLoss, like: Example, dtype: torch.dtype
) -> PerExampleBackward:
    """Return the fastest pass that gives every example the gradient it has alone.

    The pass has random weights; the caller sets those of the model. Models and losses
    that are built alike share a pass, which is checked once.

    Parameters
    ----------
    model, loss, dtype
        See `PerExampleBackward`.
    like : (inputs, targets)
        Only their shapes and types are looked at.

    Raises
    ------
    UnsupportedModelError
        If the model or the loss fails on made-up examples, or mixes them.
    """
    fingerprint = make_fingerprint(model, loss)
    if fingerprint is None:
        return _choose_backward(model, loss, like, dtype)
    key = fingerprint, get_spec(*like), dtype
    with _cache_lock:
        if key not in _backward_cache:
            _backward_cache[key] = _choose_backward(model, loss, like, dtype)
        found = _backward_cache[key]
        if len(_backward_cache) > _MAX_CACHED:
            del _backward_cache[next(iter(_backward_cache))]
    return found


def _choose_backward(
    model: nn.Module, loss: PerExampleLoss, like: Example, dtype: torch.dtype
) -> PerExampleBackward:
    """Check a model and a loss, and return their backward pass."""
    with _make_deterministic():
        trial, loss = _copy_apart(model, loss)
        trial.train()
        for layer in trial.modules():
            if isinstance(layer, _BatchNorm):  # frozen, or it would have been refused
                layer.eval()
        _draw_weights(trial)
        # Without dropout, so that gradients can be compared.
        still = copy.deepcopy(trial).eval()
        alone = PerExampleBackward(copy.deepcopy(still), loss, dtype)
        examples, expected = find_usable_examples(alone, like)
        partial = _find_partial_operation(copy.deepcopy(trial), loss, examples)
        if is_unchecked(partial):
            raise UnsupportedModelError(
                f"{partial} does not check its values, and some would end the process; "
                "do without it"
            )
        refuse_state(trial, loss, dtype, examples)
        failure: BaseException = ArithmeticError("gradients are too large, or differ")
        kinds: list[type[PerExampleBackward]] = [BatchedBackward, PerExampleBackward]
        if partial:
            kinds.remove(BatchedBackward)
        for kind in kinds:
            try:
                found = _compute_each(kind(copy.deepcopy(still), loss, dtype), examples)
                backward = kind(copy.deepcopy(trial), loss, dtype)
                _compute_each(backward, examples)
                if are_close(found, expected):
                    refuse_neighbours(backward, examples)
                    return backward
            except UnsupportedModelError:
                raise
            except BaseException as error:
                reraise_stop(error)
                failure = error
    raise describe_failure(failure, like)


@contextmanager
def _make_deterministic() -> Iterator[None]:
    """Fix the random state, and keep torch from its other path without dropout."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(SEED)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _copy_apart(
    model: nn.Module, loss: PerExampleLoss
) -> tuple[nn.Module, PerExampleLoss]:
    """Copy model and loss, or refuse them if the copies share parts with them."""

    def list_parts(module: nn.Module, loss: PerExampleLoss) -> set[int]:
        tensors = (*module.parameters(), *module.buffers(), *loss.list_tensors())
        objects = (*module.modules(), *tensors, *loss.list_objects())
        return {id(part) for part in objects}

    copies = copy.deepcopy((model, loss))
    if list_parts(model, loss) & list_parts(*copies):
        raise UnsupportedModelError(
            "a copy of the model or of the loss shares parts with the original, so "
            "examples could not be kept apart; remove its __deepcopy__"
        )
    return copies


def _draw_weights(module: nn.Module) -> None:
    """Draw random weights, which no server chose."""
    with torch.no_grad():
        for p in module.parameters():
            fan = p.numel() // len(p) if p.dim() > 1 else 1
            p.copy_(torch.randn(p.shape) / math.sqrt(fan) + (p.dim() == 1))


def _find_partial_operation(
    module: nn.Module, loss: PerExampleLoss, examples: Example
) -> str:
    """Return an operation that some value may make raise, or an empty string."""
    inputs, targets = (copy_batch(index_batch(part, EACH[0])) for part in examples)

    def compute_loss() -> torch.Tensor:
        with TotalFunctions():
            return loss(call_model(module, inputs), targets)

    trained = [p for p in module.parameters() if p.requires_grad]
    try:
        return find_partial_operation(
            compute_loss, trained, tensors_of(inputs, targets)
        )
    except BaseException as error:
        reraise_stop(error)
        return f"a training step, which raises {type(error).__name__}"


def _compute_each(path: PerExampleBackward, examples: Example) -> torch.Tensor:
    """Return the gradient of each example in a batch, (k, d)."""
    path.prepare((copy_batch(examples[0]), copy_batch(examples[1])))
    parts, _ = path.compute_parts(copy_batch(examples[0]), copy_batch(examples[1]))
    shape = COUNT, 1, sum(p.numel() for p in path.slices)
    return clip_and_sum(parts, shape, MAX_CLIP, path.dtype)
