"""Whether a model and a loss can be trained privately; asked before round 1.

No private example and no weight of a server takes part: the examples are made up, of
the shape and type of the data, and the weights are random. What no check can see is
state that a model keeps outside of itself and that made-up examples do not bring to
light, such as a global variable that changes at the hundredth call.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from flwr_safedshb.privacy.bad_examples import ignore_failure, silence_log
from flwr_safedshb.privacy.clipping.backward import (
    BatchedBackward,
    PerExampleBackward,
    call_model,
    copy_batch,
)
from flwr_safedshb.privacy.clipping.clipped_sum import MAX_CLIP, clip_and_sum
from flwr_safedshb.privacy.clipping.fingerprint import Fingerprint, make_fingerprint
from flwr_safedshb.privacy.clipping.total_losses import (
    TotalFunctions,
    find_partial_operation,
    is_unchecked,
)
from flwr_safedshb.privacy.clipping.unsafe_operations import describe_outside
from flwr_safedshb.privacy.datasets import (
    Batch,
    Example,
    Spec,
    concat_batches,
    get_spec,
    index_batch,
    tensors_of,
)
from flwr_safedshb.privacy.losses import (
    Loss,
    PerExampleLoss,
    UnsupportedModelError,
    describe_batch,
)
from flwr_safedshb.stop_signal import reraise_stop

Change = Callable[[torch.Tensor], torch.Tensor]
# Made-up examples: enough to see that one does not depend on another.
_COUNT = 3
_ONES = [slice(i, i + 1) for i in range(_COUNT)]
_SEED = 20
# Characters of an error's text.
_LONG = 100
# Models that were checked: several, because a process may simulate several clients.
_MOST_KNOWN = 8
_one_check = Lock()
_known_passes: dict[tuple[Fingerprint, Spec, torch.dtype], PerExampleBackward] = {}


def check_model(
    model: nn.Module,
    loss: Loss | None = None,
    like: Example | None = None,
) -> None:
    """Refuse a model that cannot be trained privately, before anything else is done.

    Its layers are looked at. Where examples can be made up, the model is tried on them:
    with `loss` and `like`, or as a model of Hugging Face says itself what it takes.

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
    problems = []
    for module in model.modules():
        if isinstance(module, _BatchNorm) and (
            module.training or module.running_mean is None
        ):
            problems.append(
                f"{type(module).__name__} mixes the examples of a batch; use GroupNorm "
                "(opacus.validators.ModuleValidator.fix(model) puts it in), or freeze "
                "the layer by its eval()"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (
            module.scale_grad_by_freq or module.max_norm is not None or module.sparse
        ):
            problems.append(
                "an embedding with scale_grad_by_freq, max_norm or sparse has no "
                "per-example gradient; turn these options off"
            )
    if problems:
        raise UnsupportedModelError(
            "the model cannot be trained privately: "
            + "; ".join(dict.fromkeys(problems))
        )
    given = getattr(model, "dummy_inputs", None)
    # Hugging Face says words of models that take images or sounds, too.
    wanted = getattr(model, "main_input_name", None)
    if like is None and isinstance(given, dict) and wanted in (None, *given):
        like = given, torch.zeros(len(tensors_of(given)[0]))
        loss = _first_output
    if like is not None and loss is not None:
        find_backward(model, PerExampleLoss(loss), like, trained[0].dtype)


def refuse_global_hooks() -> None:
    """Refuse to work under hooks on all modules, which see every example of a batch."""
    if nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        raise UnsupportedModelError(
            "a hook is registered on all modules of the process, which could carry one "
            "example's values to another; remove it before training"
        )


def _first_output(outputs: Batch, targets: torch.Tensor) -> torch.Tensor:
    """Stand in for a loss that is not known yet."""
    return tensors_of(outputs)[0].flatten(1).sum(1)


def find_backward(
    model: nn.Module, loss: PerExampleLoss, like: Example, dtype: torch.dtype
) -> PerExampleBackward:
    """Return the best pass that gives examples the gradients that each has alone.

    Its module has random weights, and wants those of the model. A model and a loss that
    are built like earlier ones get the same pass, without another check.

    Parameters
    ----------
    model, loss, dtype
        See `Pass`.
    like : (inputs, targets)
        Only their shapes and types are looked at.

    Raises
    ------
    UnsupportedModelError
        If the model or the loss fails on made-up examples, or mixes them.
    """
    built, kind = make_fingerprint(model, loss), get_spec(*like)
    if built is None:
        return _find_pass(model, loss, like, dtype)
    key = built, kind, dtype
    with _one_check:
        if key not in _known_passes:
            _known_passes[key] = _find_pass(model, loss, like, dtype)
        found = _known_passes[key]
        if len(_known_passes) > _MOST_KNOWN:
            del _known_passes[next(iter(_known_passes))]
    return found


def _find_pass(
    model: nn.Module, loss: PerExampleLoss, like: Example, dtype: torch.dtype
) -> PerExampleBackward:
    with _undisturbed():
        trial, loss = _copy_apart(model, loss)
        trial.train()
        for layer in trial.modules():
            if isinstance(layer, _BatchNorm):  # which must not be
                layer.eval()
        _redraw(trial)
        # Without dropout, so that there is something to compare.
        still = copy.deepcopy(trial).eval()
        examples, right = _tried(PerExampleBackward(still, loss, dtype), like)
        partial = _find_partial_operation(copy.deepcopy(trial), loss, examples)
        if is_unchecked(partial):
            raise UnsupportedModelError(
                f"{partial} does not check its values, and some would end the process; "
                "do without it"
            )
        alone = PerExampleBackward(copy.deepcopy(trial), loss, dtype)
        quiet = PerExampleBackward(copy.deepcopy(still), loss, dtype)
        with _nothing_left_outside(trial, loss):
            _refuse_mixing(still, loss, *examples)
            _refuse_outer_state(alone, examples)
            _refuse_state_in_evaluation(quiet, examples)
            _refuse_own_state(alone, examples)
        failure: BaseException = ArithmeticError("gradients are too large, or differ")
        for kind in (
            (PerExampleBackward,) if partial else (BatchedBackward, PerExampleBackward)
        ):
            try:
                found = _each(kind(copy.deepcopy(still), loss, dtype), examples)
                best = kind(copy.deepcopy(trial), loss, dtype)
                _each(best, examples)
                if _close(found, right):
                    _refuse_meeting(best, examples)
                    return best
            except UnsupportedModelError:
                raise
            except BaseException as error:
                reraise_stop(error)
                failure = error
    raise _failed(failure, like)


def _copy_apart(
    model: nn.Module, loss: PerExampleLoss
) -> tuple[nn.Module, PerExampleLoss]:
    """Return copies of model and loss, or refuse those that cannot be copied."""

    def parts(module: nn.Module, loss: PerExampleLoss) -> set[int]:
        tensors = (*module.parameters(), *module.buffers(), *loss.parameters())
        own = loss.own_objects()
        return {id(part) for part in (*module.modules(), *tensors, *own)}

    copies = copy.deepcopy((model, loss))
    if parts(model, loss) & parts(*copies):
        raise UnsupportedModelError(
            "a copy of the model or of the loss shares parts with the original, so "
            "examples could not be kept apart; remove its __deepcopy__"
        )
    return copies


def _find_partial_operation(
    module: nn.Module, loss: PerExampleLoss, examples: Example
) -> str:
    """Return an operation that some value may make raise, or an empty string."""
    one = [copy_batch(index_batch(part, _ONES[0])) for part in examples]

    def compute_loss() -> torch.Tensor:
        with TotalFunctions():
            return loss(call_model(module, one[0]), one[1])

    trained = [p for p in module.parameters() if p.requires_grad]
    try:
        return find_partial_operation(compute_loss, trained, tensors_of(*one))
    except BaseException as error:
        reraise_stop(error)
        return f"a training step, which raises {type(error).__name__}"


def _scale(examples: Example, size: float) -> Example:
    """Return made-up examples that are `size` times as large.

    Whole numbers stay as they are up to 1000, and then become such as no label has.
    """

    def scale(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            return tensor * size
        if tensor.dtype == torch.bool or size <= 1000.0:
            return tensor
        odd = -1 if size == math.inf else torch.iinfo(tensor.dtype).max
        return torch.full_like(tensor, odd)

    return cast(Example, tree_map_only(torch.Tensor, scale, examples))


def _refuse_own_state(path: PerExampleBackward, examples: Example) -> None:
    """Refuse a model or a loss that changes what it holds while it trains."""
    for of_weights, of_examples in (
        (1.0, 1.0),
        (1.0, 1e3),
        (1e3, 1e30),
        (1.0, math.inf),
    ):
        with torch.no_grad():
            for parameter in path.parameters:
                parameter.mul_(of_weights)
        before = _held_tensors(path.module, path.loss)
        module, loss, _ = path.make_copy()
        inputs, targets = map(copy_batch, _scale(examples, of_examples))
        with ignore_failure():
            loss(call_model(module, inputs), targets)
        after = _held_tensors(module, loss)
        for name, tensor in before.items():
            if name in after and not _same_bits(tensor, after[name]):
                raise UnsupportedModelError(
                    f"{name} changes while the model trains, and would carry one "
                    "example's values to others; keep no statistics or caches of "
                    "examples there, or freeze the layer by its eval()"
                )


def _held_tensors(module: nn.Module, loss: PerExampleLoss) -> dict[str, torch.Tensor]:
    """Return the tensors of a model and its loss, by what they are."""
    found: dict[str, torch.Tensor] = {}
    found |= {f"the parameter {name}": p for name, p in module.named_parameters()}
    found |= {f"the buffer {name}": b for name, b in module.named_buffers()}
    for name, layer in module.named_modules():
        kind = f" of {name}" if name else ""
        found |= {
            f"the attribute {key}{kind}": value
            for key, value in vars(layer).items()
            if isinstance(value, torch.Tensor)
        }
    found |= {
        f"the loss's {key}": value
        for owner in loss.own_objects()
        for key, value in vars(owner).items()
        if isinstance(value, torch.Tensor)
    }
    return {name: tensor.detach() for name, tensor in found.items()}


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal, where NaN equals NaN."""
    return one.shape == other.shape and bool(
        torch.isclose(one, other, rtol=0.0, atol=0.0, equal_nan=True).all()
    )


_MEETING = (
    "an example's gradient depends on examples before it or beside it: the model or "
    "the loss keeps values outside itself, in a class, a global variable or a closure; "
    "keep them in local variables"
)
# Sizes of made-up examples, between which a model must not remember anything.
_SIZES = (1.0, 1e-30, 0.0, 1e3, 1e30, math.inf)


@contextmanager
def _nothing_left_outside(module: nn.Module, loss: PerExampleLoss) -> Iterator[None]:
    """Refuse a model or a loss that leaves a value in what all its copies share."""
    functions = loss.function
    before = describe_outside(module, functions)
    yield
    after = describe_outside(module, functions)
    for name, value in before.items():
        if value != after.get(name, value):
            raise UnsupportedModelError(
                f"{name} changes while the model is used, and would carry values of "
                "one example to others; keep them in local variables"
            )


def _refuse_state_in_evaluation(path: PerExampleBackward, examples: Example) -> None:
    """Refuse a model whose loss of an example depends on the examples before it."""

    def compute_loss(inputs: Batch, targets: Batch) -> torch.Tensor:
        module, loss, _ = path.make_copy()
        with torch.no_grad(), TotalFunctions():
            return loss(
                call_model(module, copy_batch(inputs)), copy_batch(targets)
            ).detach()

    _refuse_memory(compute_loss, examples)


def _refuse_outer_state(path: PerExampleBackward, examples: Example) -> None:
    """Refuse a model whose gradient of an example depends on the examples before it."""
    _refuse_memory(lambda *example: path.gradient(*example)[0], examples)


def _refuse_memory(
    compute: Callable[[Batch, Batch], torch.Tensor], examples: Example
) -> None:
    """Refuse if the values of an example change once others have been computed."""

    def take(place: int, size: float = 1.0) -> torch.Tensor:
        torch.manual_seed(_SEED)
        inputs, targets = (
            index_batch(part, _ONES[place]) for part in _scale(examples, size)
        )
        return compute(inputs, targets)

    first = take(0)
    for size in _SIZES:
        with ignore_failure():
            take(1, size)
        if not _same_bits(first, take(0)):
            raise UnsupportedModelError(_MEETING)


def _refuse_meeting(path: PerExampleBackward, examples: Example) -> None:
    """Refuse a pass in which an example's gradient depends on those beside it.

    The first place has the same example in every batch, and the same random numbers.
    """
    first: torch.Tensor | None = None
    for size in (1.0, 1e30, math.inf, 1.0):
        both = zip(examples, _scale(examples, size), strict=True)
        batch = [_beside(part, other) for part, other in both]
        torch.manual_seed(_SEED)
        with silence_log():
            parts, losses = path.run(*map(copy_batch, batch))
        if not parts:
            return
        shape = _COUNT, 1, sum(p.numel() for p in path.places)
        usable = losses.isfinite()
        found = clip_and_sum(parts, shape, MAX_CLIP, path.dtype, usable)[0]
        if first is not None and not _same_bits(first, found):
            raise UnsupportedModelError(_MEETING)
        first = found


def _beside(one: Batch, others: Batch) -> Batch:
    """Return a batch with the first example of one batch and the rest of another."""
    first, rest = index_batch(one, slice(0, 1)), index_batch(others, slice(1, _COUNT))
    return concat_batches([first, rest])


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Fix the random state, and keep torch from taking other ways without dropout."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(_SEED)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _redraw(module: nn.Module) -> None:
    """Give a module weights of its own, which no server chose."""
    with torch.no_grad():
        for p in module.parameters():
            fan = p.numel() // len(p) if p.dim() > 1 else 1
            p.copy_(torch.randn(p.shape) / math.sqrt(fan) + (p.dim() == 1))


def _tried(
    alone: PerExampleBackward, like: Example, cure: bool = True
) -> tuple[Example, torch.Tensor]:
    """Return examples that model and loss can take, and the gradient of each."""
    failure: BaseException | None = None
    for words, classes in itertools.product((10, 2, 1), (10, 3, 2, 1)):
        examples = _made_up(like[0], words), _made_up(like[1], classes, targets=True)
        try:
            pairs = [
                alone.gradient(*(index_batch(p, one) for p in examples))
                for one in _ONES
            ]
            found = torch.stack([gradient for gradient, _ in pairs])
            if found.isfinite().all() and all(loss.isfinite() for _, loss in pairs):
                return examples, found
            failure = ArithmeticError("the loss or the gradient is not finite")
        except UnsupportedModelError:
            raise
        except BaseException as error:
            reraise_stop(error)
            failure = error
    raise _failed(failure, like, _cures(alone, like) if cure else []) from failure


def _cures(alone: PerExampleBackward, like: Example) -> list[str]:
    """Return the changes of the data with which model and loss work: they are tried."""
    made = _made_up(like[0], 1), _made_up(like[1], 1)
    weights = next(p.dtype for p in alone.module.parameters() if p.requires_grad)
    word = str(weights).removeprefix("torch.")
    changes: list[tuple[str, Change]] = [
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
            inputs = tree_map_only(torch.Tensor, first, made[0])
            targets = tree_map_only(torch.Tensor, second, made[1])
            _tried(alone, (inputs, targets), cure=False)
            words = one.format("inputs"), two.format("targets")
            return [cure for cure in words if cure]
    return ["leave out by unpack= what it does not take"] * isinstance(like[0], dict)


def _made_up(like: Batch, numbers: int, targets: bool = False) -> Batch:
    def made(tensor: torch.Tensor) -> torch.Tensor:
        shape = (_COUNT, *tensor.shape[1:])
        if not tensor.is_floating_point():
            drawn = torch.randint(numbers, shape)
        else:
            drawn = torch.rand(shape) if targets else torch.randn(shape)
        return drawn.to(tensor.device, tensor.dtype)

    return cast(Batch, tree_map_only(torch.Tensor, made, like))


def _each(path: PerExampleBackward, examples: Example) -> torch.Tensor:
    """Return each example's gradient, (k, d)."""
    path.settle(cast(Example, [*map(copy_batch, examples)]))
    parts, _ = path.parts(*map(copy_batch, examples))
    shape = _COUNT, 1, sum(p.numel() for p in path.places)
    return clip_and_sum(parts, shape, MAX_CLIP, path.dtype)


def _refuse_mixing(
    module: nn.Module, loss: PerExampleLoss, inputs: Batch, targets: Batch
) -> None:
    """Refuse what would not train as its author meant: every example is alone here."""
    alone = [
        loss(
            call_model(module, copy_batch(index_batch(inputs, one))),
            index_batch(targets, one),
        )
        for one in _ONES
    ]
    together = loss(call_model(module, copy_batch(inputs)), targets)
    if not _close(together.unsqueeze(1), torch.cat(alone).unsqueeze(1)):
        raise UnsupportedModelError(
            "the model or the loss mixes the examples of a batch: their losses are not "
            "those that each example has alone; keep every layer to one example, as "
            "recurrent ones do with batch_first=True"
        )


def _close(found: torch.Tensor, right: torch.Tensor) -> bool:
    """Compare rows, up to the rounding of deep models."""
    tolerance = max(1e-2, torch.finfo(found.dtype).eps ** 0.5)
    gap = torch.linalg.vector_norm(found - right, dim=1)
    size = torch.linalg.vector_norm(right, dim=1)
    return bool((gap <= tolerance * (size + 1e-3 * size.max())).all())


def _failed(
    error: BaseException | None, like: Example, cures: Sequence[str] = ()
) -> UnsupportedModelError:
    """Say what went wrong with made-up examples, and what may mend it."""
    if isinstance(error, UnsupportedModelError):
        return error
    text = " ".join(str(error).split())[:_LONG]
    return UnsupportedModelError(
        "; ".join(
            [
                "the model or the loss fails on made-up examples like the data, inputs "
                f"{describe_batch(like[0])} and targets {describe_batch(like[1])}",
                *cures,
                f"{type(error).__name__}: {text}",
            ]
        )
    )
