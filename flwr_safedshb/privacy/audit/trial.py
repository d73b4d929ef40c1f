"""One candidate of the search: weights, a batch, and an example to exchange in it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from flwr_safedshb.privacy.audit.numbers import QUIET, WILD, hostile
from flwr_safedshb.privacy.audit.subject import Batch, Subject

# Sizes of batches: one example alone, few, and many that add up their rounding.
SIZES = (1, 2, 3, 5, 8, 33)


@dataclass(frozen=True)
class Trial:
    """A candidate.

    Attributes
    ----------
    weights : list of Tensor
        What the server sends: all floating-point entries of the model's state.
    batch : (inputs, targets)
        k examples; the first of them is the one that is looked at.
    other : (inputs, targets)
        The one example that takes its place.
    """

    weights: list[torch.Tensor]
    batch: Batch
    other: Batch

    @property
    def alone(self) -> Batch:
        """The first example."""
        return self.batch[0][:1], self.batch[1][:1]

    @property
    def rest(self) -> Batch:
        """The batch without the first example."""
        return self.batch[0][1:], self.batch[1][1:]

    @property
    def exchanged(self) -> Batch:
        """The batch with the other example in place of the first."""
        inputs, targets = (
            torch.cat([mine, rest])
            for mine, rest in zip(self.other, self.rest, strict=True)
        )
        return inputs, targets


def entries(model: nn.Module) -> list[torch.Tensor]:
    """Return the floating-point entries of a model's state, as they are in it."""
    state = model.state_dict(keep_vars=True).values()
    return [entry.detach() for entry in state if entry.is_floating_point()]


def drawn(
    subject: Subject, weights: list[torch.Tensor], rng: np.random.Generator
) -> Trial:
    """Return a random candidate, made of `weights` and of examples of the subject."""
    dtype = weights[0].dtype
    mood = QUIET if rng.random() < 0.4 else WILD
    # In one of four the weights are as they are, and in one of four the data.
    if rng.random() < 0.75:
        weights = [hostile(weight, rng, mood) for weight in weights]
    inputs, targets = typed(subject.draw(int(rng.choice(SIZES)), rng), dtype)
    other = typed(subject.draw(1, rng), dtype)
    if rng.random() < 0.75:
        inputs = hostile(inputs, rng, mood)
    if rng.random() < 0.3:  # many that pull the same way
        inputs, targets = (_first_repeated(part) for part in (inputs, targets))
    if rng.random() < 0.5:
        other = hostile(other[0], rng), other[1]
    elif rng.random() < 0.5:  # an opposite, as far away as it gets
        other = (-inputs[:1] if inputs.is_floating_point() else inputs[:1]), other[1]
    return Trial(weights, (inputs, targets), other)


def mutated(subject: Subject, trial: Trial, rng: np.random.Generator) -> Trial:
    """Return a candidate near another one."""
    kind = rng.integers(4)
    if kind == 0:
        weights = list(trial.weights)
        place = int(rng.integers(len(weights)))
        weights[place] = hostile(weights[place], rng)
        return replace(trial, weights=weights)
    if kind == 1:
        return replace(trial, batch=(hostile(trial.batch[0], rng), trial.batch[1]))
    if kind == 2:
        powers = 2.0 ** rng.integers(-4, 5, size=len(trial.weights))
        weights = [w * float(p) for w, p in zip(trial.weights, powers, strict=True)]
        return replace(trial, weights=weights)
    other = typed(subject.draw(1, rng), trial.weights[0].dtype)
    return replace(trial, other=(hostile(other[0], rng), other[1]))


def typed(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return the batch with floating-point values of the model's type."""
    inputs, targets = (
        part.to(dtype) if part.is_floating_point() else part for part in batch
    )
    return inputs, targets


def _first_repeated(part: torch.Tensor) -> torch.Tensor:
    return part[:1].expand_as(part).clone()
