"""Whether a model and a loss can be trained privately; asked before round 1.

No private example and no weight of a server takes part: the examples are made up, of
the shape and type of the data, and the weights are random.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from flwr_safedshb.privacy.clipping.passes import Pass, Together, called
from flwr_safedshb.privacy.clipping.sums import MAX_CLIP, clipped_sums
from flwr_safedshb.privacy.examples import Batch, Example, rows, tensors_of
from flwr_safedshb.privacy.losses import (
    Loss,
    PerExampleLoss,
    UnsupportedModelError,
    in_words,
)

Change = Callable[[torch.Tensor], torch.Tensor]
# Made-up examples: enough to see that one does not depend on another.
_COUNT = 3
_ONES = [slice(i, i + 1) for i in range(_COUNT)]
_SEED = 20
# Characters of an error's text.
_LONG = 100


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
        best_pass(model, PerExampleLoss(loss), like, trained[0].dtype)


def _first_output(outputs: Batch, targets: torch.Tensor) -> torch.Tensor:
    """Stand in for a loss that is not known yet."""
    return tensors_of(outputs)[0].flatten(1).sum(1)


def best_pass(
    model: nn.Module, loss: PerExampleLoss, like: Example, dtype: torch.dtype
) -> Pass:
    """Return the best pass that gives examples the gradients that each has alone.

    Its module has random weights, and wants those of the model.

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
    with _undisturbed():
        trial = copy.deepcopy(model).train()
        for layer in trial.modules():
            if isinstance(layer, _BatchNorm):  # which must not be
                layer.eval()
        _redraw(trial)
        # Without dropout, so that there is something to compare.
        still = copy.deepcopy(trial).eval()
        examples, right = _tried(Pass(still, loss, dtype), like)
        _refuse_mixing(still, loss, *examples)
        failure: Exception = ArithmeticError("gradients are too large, or differ")
        for kind in (Together, Pass):
            try:
                found = _each(kind(copy.deepcopy(still), loss, dtype), examples)
                best = kind(copy.deepcopy(trial), loss, dtype)
                before = torch.get_rng_state()
                _each(best, examples)
                best.random = not torch.equal(before, torch.get_rng_state())
                if _close(found, right):
                    return best
            except Exception as error:
                failure = error
    raise _failed(failure, like)


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
    alone: Pass, like: Example, cure: bool = True
) -> tuple[Example, torch.Tensor]:
    """Return examples that model and loss can take, and the gradient of each."""
    failure: Exception | None = None
    for words, classes in itertools.product((10, 2, 1), (10, 3, 2, 1)):
        examples = _made_up(like[0], words), _made_up(like[1], classes, targets=True)
        try:
            found = [alone.gradient(*(rows(p, one) for p in examples)) for one in _ONES]
            return examples, torch.stack(found)
        except UnsupportedModelError:
            raise
        except Exception as error:
            failure = error
    raise _failed(failure, like, _cures(alone, like) if cure else [])


def _cures(alone: Pass, like: Example) -> list[str]:
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


def _each(path: Pass, examples: Example) -> torch.Tensor:
    """Return each example's gradient, (k, d)."""
    path.settle(examples)
    shape = _COUNT, 1, sum(p.numel() for p in path.places)
    return clipped_sums(path.parts(*examples), shape, MAX_CLIP, path.dtype)


def _refuse_mixing(
    module: nn.Module, loss: PerExampleLoss, inputs: Batch, targets: Batch
) -> None:
    """Refuse what would not train as its author meant: every example is alone here."""
    alone = [
        loss(called(module, rows(inputs, one)), rows(targets, one)) for one in _ONES
    ]
    together = loss(called(module, inputs), targets)
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
    error: Exception | None, like: Example, cures: Sequence[str] = ()
) -> UnsupportedModelError:
    """Say what went wrong with made-up examples, and what may mend it."""
    if isinstance(error, UnsupportedModelError):
        return error
    text = " ".join(str(error).split())[:_LONG]
    return UnsupportedModelError(
        "; ".join(
            [
                "the model or the loss fails on made-up examples like the data, inputs "
                f"{in_words(like[0])} and targets {in_words(like[1])}",
                *cures,
                f"{type(error).__name__}: {text}",
            ]
        )
    )
