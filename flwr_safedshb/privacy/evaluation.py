"""What a model is worth on private examples: counts with noise, one release.

Every example is worth two numbers between 0 and 1: whether the model is right, and its
loss in units of the greatest that counts. The release is their sums over all examples,
and if asked the same by class with the number of examples in it, all with Gaussian
noise of one deviation.

Formal guarantees
-----------------
- The sums are of whole numbers of 2^-20, and so exact: what one example changes is what
  stands here, in floating point, too.
- Replacing an example moves the two sums by at most 1 each, together by sqrt(2). By
  class it also takes (1, c - 1/2, l - 1/2) from one class and puts as much into
  another, squares of 3/2 each: sqrt(5) in all.
- Every example goes through the model alone, with the state that the model was given in
  and random numbers of its own, so no other one has a part in its numbers.
  One that cannot be read, or that the model or the loss cannot take, counts as wrong,
  with the greatest loss: whatever the examples are, there is an answer.
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
from flwr_safedshb.privacy.clipping.backward import (
    PerExampleBackward,
    call_model,
    copy_batch,
    flush_denormals,
)
from flwr_safedshb.privacy.clipping.total_losses import TotalFunctions
from flwr_safedshb.privacy.datasets import (
    Batch,
    Examples,
    index_batch,
    make_examples,
    tensors_of,
)
from flwr_safedshb.privacy.losses import Loss, PerExampleLoss
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.randomness.noise import Randomness, rounded
from flwr_safedshb.privacy.randomness.streams import separate_streams

Floats = NDArray[np.float64]
# From the outputs and the target of one example to whether the outputs are right.
Right = Callable[[Batch, Batch], bool]

# The numbers of an example are multiples of its inverse.
_UNIT = 2**20


@dataclass(frozen=True)
class Question:
    """What is to be counted.

    Attributes
    ----------
    max_loss : float
        The loss that counts as 1; greater ones count as much.
    num_classes : int, optional
        Count by class, too.
    """

    max_loss: float
    num_classes: int | None = None

    @property
    def sensitivity(self) -> float:
        """What replacing one example moves the sums by, at most."""
        return math.sqrt(2.0 if self.num_classes is None else 5.0)


@dataclass(frozen=True)
class Counts:
    """What is released, all in examples.

    Attributes
    ----------
    correct, loss : float
        Right answers, and the sum of losses in units of the greatest.
    classes : ndarray of shape (3, k), optional
        Examples, right answers and losses by class.
    noise_std : float
        Deviation of the noise in each; in right answers and losses of a class, and in
        these alone, half of that in its number of examples comes on top.
    """

    correct: float
    loss: float
    classes: Floats | None
    noise_std: float


def is_right(outputs: Batch, target: Batch) -> bool:
    """Say whether the largest output is the target; of one output, whether its sign."""
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
    right: Right = is_right,
) -> Counts:
    """Count what a model gets right on all examples of a dataset, and add noise.

    Parameters
    ----------
    model : (model, loss)
    dataset : Examples, or what `examples_of` takes
    plan : PrivacyPlan
        For ``sampling="whole"``; its noise is in units of the question's sensitivity.
    randomness : Randomness
    question : Question
    right : callable (outputs, target) -> bool
        Of one example.
    """
    if plan.sampling != "whole":
        raise ValueError(f"sampling={plan.sampling!r} must be 'whole' to evaluate")
    examples = make_examples(dataset)
    if randomness.private:
        examples.refuse_undeclared()
    module = copy.deepcopy(model[0]).eval()
    alone = PerExampleBackward(module, PerExampleLoss(model[1]), torch.float64)
    sums = np.zeros(2 + 3 * (question.num_classes or 0), np.int64)
    even = TimePadding()
    streams = separate_streams(plan.num_examples)
    calm, still = flush_denormals(), torch.no_grad()
    with ignore_warnings(), still, calm, TotalFunctions(), streams as start:
        for index in range(plan.num_examples):
            start(index)
            sums += _numbers(alone, examples, index, question, right, even)
        even.wait()
    std = plan.noise_multiplier * question.sensitivity
    noisy = randomness.gaussian(len(sums), std)
    noisy += sums / _UNIT
    if randomness.private and std > 0:
        noisy = rounded(noisy, std)
    classes = None
    if question.num_classes is not None:
        classes = noisy[2:].reshape(3, -1).copy()
        classes[1:] += classes[0] / 2  # they were counted from 1/2
    return Counts(float(noisy[0]), float(noisy[1]), classes, std)


def _numbers(
    alone: PerExampleBackward,
    examples: Examples,
    index: int,
    question: Question,
    right: Right,
    even: TimePadding,
) -> NDArray[np.int64]:
    """Return the numbers of one example, in units of 2^-20."""
    found = np.zeros(2 + 3 * (question.num_classes or 0), np.int64)
    correct, share, label = False, 1.0, -1
    example = examples.one(index)
    stands_in = examples.like if example is None else example
    if stands_in is not None:  # which takes the time of any other
        inputs, target = (
            copy_batch(index_batch(part, slice(0, 1))) for part in stands_in
        )
        with even.example():
            module, loss, _ = alone.make_copy()
            outputs = call_model(module, inputs)
            value = float(loss(outputs, target).double().sum()) / question.max_loss
            found_right = bool(right(outputs, target))
            if example is not None:
                correct, share = found_right, value
    if example is not None:
        label = _label(example[1], question)
    # Written so that what is not a number is the greatest loss.
    whole = math.floor(max(share, 0.0) * _UNIT) if share < 1.0 else _UNIT
    found[:2] = correct * _UNIT, whole
    if question.num_classes is not None and label >= 0:
        by_class = found[2:].reshape(3, -1)
        by_class[:, label] = _UNIT, correct * _UNIT - _UNIT // 2, whole - _UNIT // 2
    return found


def _label(target: Batch, question: Question) -> int:
    """Return the class of an example, or -1 if it is in none of those there are."""
    if question.num_classes is None:
        return -1
    value = tensors_of(target)[0].reshape(-1)
    number = float(value[0]) if len(value) == 1 else math.nan
    known = number in range(question.num_classes)
    return int(number) if known else -1
