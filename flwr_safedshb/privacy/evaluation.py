"""Evaluate a model on private examples: noisy counts, in one release.

Every example contributes two numbers between 0 and 1: whether the model is right, and
its loss in units of the largest that counts. The release is their sums over all
examples, and on request the same by class with the number of examples of each, all with
Gaussian noise of one deviation.

Formal guarantees
-----------------
- The sums are of integer multiples of 2^-20, and so exact: the sensitivities here hold
  in floating point, too.
- Replacing an example moves the two sums by at most 1 each, together by sqrt(2). By
  class it also takes (1, c - 1/2, l - 1/2) from one class and puts as much into
  another, squares of 3/2 each: sqrt(5) in all.
- Every example goes through the model alone, with the state that the model was given in
  and random numbers of its own, so no other one has a part in its numbers.
  One that cannot be read, or that the model or the loss cannot take, counts as wrong,
  with the largest loss: whatever the examples are, there is an answer.
- A person has one vote: the weighted mean of the numbers of at most K examples, with
  weights that are integer multiples of 2^-20 and add up to 1. So it lies in the convex
  hull of what one example can contribute, and the hull has the same diameter:
  exchanging all examples of a person moves the sums by no more than one example did.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from flwr_safedshb.privacy.bad_examples import TimePadding, ignore_warnings
from flwr_safedshb.privacy.batches import (
    Batch,
    Example,
    copy_batch,
    index_batch,
    tensors_of,
)
from flwr_safedshb.privacy.clipping.backward import (
    PerExampleBackward,
    call_model,
    flush_denormals,
)
from flwr_safedshb.privacy.clipping.total_functions import TotalFunctions
from flwr_safedshb.privacy.datasets import make_examples
from flwr_safedshb.privacy.losses import Loss, PerExampleLoss
from flwr_safedshb.privacy.owners import OwnedExamples, PrivateData
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.randomness.noise import Randomness, round_to_grid
from flwr_safedshb.privacy.randomness.streams import separate_streams

Floats = NDArray[np.float64]
# (outputs, target) of one example -> whether the outputs are correct.
IsCorrect = Callable[[Batch, Batch], bool]

# An example's numbers are multiples of 2^-20.
_SCALE = 2**20


@dataclass(frozen=True)
class Question:
    """What an evaluation counts.

    Attributes
    ----------
    max_loss : float
        The loss that counts as 1; larger ones count as much.
    num_classes : int, optional
        Number of classes, to count by class, too.
    """

    max_loss: float
    num_classes: int | None = None

    @property
    def sensitivity(self) -> float:
        """How far replacing one example, or person, moves the sums, at most."""
        return math.sqrt(2.0 if self.num_classes is None else 5.0)


@dataclass(frozen=True)
class Counts:
    """Noisy counts, in units of an example, or of a person.

    Attributes
    ----------
    correct, loss : float
        Correct answers, and the sum of losses in units of the largest.
    classes : ndarray of shape (3, k), optional
        Examples, correct answers and losses by class.
    noise_std : float
        Standard deviation of the noise in each. Correct answers and losses of a class
        also have half of the noise in its number of examples.
    """

    correct: float
    loss: float
    classes: Floats | None
    noise_std: float


def is_correct(outputs: Batch, target: Batch) -> bool:
    """Return whether the largest output, or the sign of a single one, is the target."""
    (label,) = tensors_of(target)[0].reshape(-1).tolist()
    scores = tensors_of(outputs)[0].reshape(-1)
    if not torch.isfinite(scores).all():
        return False
    if len(scores) == 1:
        return bool(scores[0] > 0) == bool(label > 0.5)
    return bool(int(scores.argmax()) == label)


def private_counts(
    model: tuple[nn.Module, Loss],
    dataset: object,
    plan: PrivacyPlan,
    randomness: Randomness,
    question: Question,
    is_correct: IsCorrect = is_correct,
) -> Counts:
    """Count the correct answers and losses of a model on all examples, and add noise.

    Parameters
    ----------
    model : (model, loss)
    dataset : Examples, OwnedExamples, or what `make_examples` takes
    plan : PrivacyPlan
        For ``sampling="whole"``; its noise is in units of the question's sensitivity.
    randomness : Randomness
    question : Question
    is_correct : callable (outputs, target) -> bool
        Of one example.
    """
    if plan.sampling != "whole":
        raise ValueError(f"sampling={plan.sampling!r} must be 'whole' to evaluate")
    examples: PrivateData
    if isinstance(dataset, OwnedExamples):
        examples, per_owner = dataset, dataset.per_owner
    else:
        examples, per_owner = make_examples(dataset), 1
    if randomness.private:
        examples.refuse_undeclared()
    module = copy.deepcopy(model[0]).eval()
    alone = PerExampleBackward(module, PerExampleLoss(model[1]), torch.float64)
    sums = np.zeros(2 + 3 * (question.num_classes or 0), np.int64)
    padding = TimePadding()
    with (
        ignore_warnings(),
        torch.no_grad(),
        flush_denormals(),
        TotalFunctions(),
        separate_streams(plan.num_examples * per_owner) as start_stream,
    ):
        for place in range(plan.num_examples * per_owner):
            if place % per_owner == 0:
                votes = _list_votes(examples, place // per_owner, randomness)
            start_stream(place)
            index, weight = votes[place % per_owner]
            example = None if index is None else examples.read_one(index)
            sums += _count_example(
                alone, example, examples.like, weight, question, is_correct, padding
            )
        padding.wait()
    std = plan.noise_multiplier * question.sensitivity
    noisy = randomness.gaussian(len(sums), std)
    noisy += sums / _SCALE
    if randomness.private and std > 0:
        noisy = round_to_grid(noisy, std)
    classes = None
    if question.num_classes is not None:
        classes = noisy[2:].reshape(3, -1).copy()
        classes[1:] += classes[0] / 2  # they were counted from 1/2
    return Counts(float(noisy[0]), float(noisy[1]), classes, std)


def _list_votes(
    examples: PrivateData, index: int, randomness: Randomness
) -> list[tuple[int | None, int]]:
    """Return the examples with a vote of one example or person, and their weights.

    The weights are even and add up to 2^20. A person without any example is None.
    """
    if not isinstance(examples, OwnedExamples):
        return [(index, _SCALE)]
    chosen, count = examples.draw_examples(index, randomness)
    cuts = np.arange(count + 1) * (_SCALE // 2) // max(count, 1)
    weights = (2 * np.diff(cuts)).tolist() if count else [_SCALE]
    weights += [0] * (len(chosen) - len(weights))  # repeats take as long as others
    return [*zip(chosen if count else [None] * len(chosen), weights, strict=True)]


def _count_example(
    alone: PerExampleBackward,
    example: Example | None,
    like: Example,
    weight: int,
    question: Question,
    is_correct: IsCorrect,
    padding: TimePadding,
) -> NDArray[np.int64]:
    """Return what an example contributes to all sums, in units of 2^-20."""
    correct, share, label = False, 1.0, -1
    # A made-up one takes the time of an example that cannot be read.
    inputs, target = (
        copy_batch(index_batch(part, slice(0, 1)))
        for part in (like if example is None else example)
    )
    with padding.time_example():
        module, loss, _ = alone.make_copy()
        outputs = call_model(module, inputs)
        value = float(loss(outputs, target).double().sum()) / question.max_loss
        is_right = bool(is_correct(outputs, target))
        if example is not None:
            correct, share = is_right, value
    if example is not None:
        label = _get_label(example[1], question)
    # Written so that a loss that is not a number counts as the largest.
    whole = math.floor(max(share, 0.0) * weight) if share < 1.0 else weight
    found = np.zeros(2 + 3 * (question.num_classes or 0), np.int64)
    found[:2] = correct * weight, whole
    if question.num_classes is not None and label >= 0:
        by_class = found[2:].reshape(3, -1)
        by_class[:, label] = weight, correct * weight - weight // 2, whole - weight // 2
    return found


def _get_label(target: Batch, question: Question) -> int:
    """Return the class of an example, or -1 if there is no such class."""
    if question.num_classes is None:
        return -1
    value = tensors_of(target)[0].reshape(-1)
    number = float(value[0]) if len(value) == 1 else math.nan
    known = number in range(question.num_classes)
    return int(number) if known else -1
