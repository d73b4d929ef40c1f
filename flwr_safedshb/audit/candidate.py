"""One candidate of the search: weights, a batch, and an example to exchange in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import nn

from flwr_safedshb.audit.hostile_values import QUIET, WILD, hostile, misplaced
from flwr_safedshb.audit.target_model import Batch, Subject

# How a client has its examples: as a batch already, as whole arrays, or as items.
Form = Literal["batch", "arrays", "items"]
FORMS: tuple[Form, ...] = ("batch", "arrays", "items")

# Sizes of batches: one example alone, few, and many that add up their rounding; and
# how many of a size are measured at once, with the same weights.
GROUPS = {1: 72, 2: 48, 3: 36, 5: 24, 8: 15, 33: 3}
_SHARES = (0.25, 0.25, 0.2, 0.15, 0.1, 0.05)


@dataclass(frozen=True)
class Trial:
    """Candidates that share their weights.

    Attributes
    ----------
    weights : list of Tensor
        What the server sends: all floating-point entries of the model's state.
    batch : (inputs, targets)
        Batches of k examples in a row; the first of each is the one looked at.
    other : (inputs, targets)
        For each batch the example that takes the place of the first.
    usable : Tensor of bool
        Which places of the batches are not empty, with the first of each.
    readable : Tensor of bool
        Which of the other examples can be read.
    seed : int
        Of torch's random state in every pass.
    form : {"batch", "arrays", "items"}
        How the clipper gets the examples.
    """

    weights: list[torch.Tensor]
    batch: Batch
    other: Batch
    usable: torch.Tensor
    readable: torch.Tensor
    seed: int = 1
    form: Form = "batch"

    @property
    def groups(self) -> int:
        """How many batches."""
        return len(self.other[1])

    @property
    def first(self) -> Batch:
        """The first batch."""
        count = len(self.batch[1]) // self.groups
        return self.batch[0][:count], self.batch[1][:count]

    @property
    def exchanged(self) -> tuple[Batch, torch.Tensor]:
        """The batches with the other examples in place of their first; which count."""
        inputs, targets = (part.clone() for part in self.batch)
        inputs[self.firsts], targets[self.firsts] = self.other
        usable = self.usable.clone()
        usable[self.firsts] = self.readable
        return (inputs, targets), usable

    @property
    def emptied(self) -> tuple[Batch, torch.Tensor]:
        """The batches with an empty place for their first, where the others stand."""
        return self.exchanged[0], self.usable & ~self.firsts

    @property
    def firsts(self) -> torch.Tensor:
        """Which examples are the first of their batch."""
        count = len(self.batch[1])
        return torch.arange(count) % (count // self.groups) == 0


def entries(model: nn.Module) -> list[torch.Tensor]:
    """Return the floating-point entries of a model's state, as they are in it."""
    state = model.state_dict(keep_vars=True).values()
    return [entry.detach() for entry in state if entry.is_floating_point()]


def drawn(
    subject: Subject, weights: list[torch.Tensor], rng: np.random.Generator
) -> Trial:
    """Return random candidates, made of `weights` and of examples of the subject."""
    dtype = weights[0].dtype
    mood = QUIET if rng.random() < 0.4 else WILD
    # In one of four the weights are as they are, and in one of four the data.
    if rng.random() < 0.75:
        weights = [hostile(weight, rng, mood) for weight in weights]
    size = int(rng.choice(list(GROUPS), p=_SHARES))
    # Now and then one batch alone, as a client has it.
    groups = min(GROUPS[size], subject.together) if rng.random() < 0.9 else 1
    inputs, targets = typed(subject.draw(groups * size, rng), dtype)
    batches = list(
        zip(torch.split(inputs, size), torch.split(targets, size), strict=True)
    )
    for i, (some, labels) in enumerate(batches):
        if rng.random() < 0.75:
            batches[i] = hostile(some, rng, mood), labels
        if rng.random() < 0.3:  # many that pull the same way
            batches[i] = _first_repeated(batches[i][0]), _first_repeated(labels)
    inputs, targets = map(torch.cat, zip(*batches, strict=True))
    if rng.random() < 0.3:
        targets = _mislabelled(targets, rng)
    other = typed(subject.draw(groups, rng), dtype)
    if rng.random() < 0.5:
        other = hostile(other[0], rng), other[1]
    elif rng.random() < 0.5:  # opposites, as far away as it gets
        firsts = inputs[::size]
        other = (-firsts if firsts.is_floating_point() else firsts), other[1]
    if rng.random() < 0.3:
        other = other[0], _mislabelled(other[1], rng)
    usable, readable = torch.ones(len(targets), dtype=torch.bool), rng.random(groups)
    if size > 1 and rng.random() < 0.3:
        usable = torch.from_numpy(rng.random(len(targets)) < 0.7)
        usable[::size] = True
    return Trial(
        weights,
        (inputs, targets),
        other,
        usable,
        torch.from_numpy(readable < 0.9),
        int(rng.integers(2**31)),
        FORMS[rng.choice(3, p=(0.5, 0.25, 0.25))],
    )


def usual(
    subject: Subject, weights: list[torch.Tensor], rng: np.random.Generator
) -> Trial:
    """Return candidates as they are in ordinary training."""
    groups = min(GROUPS[2], subject.together)
    batch, other = (
        typed(subject.draw(count, rng), weights[0].dtype)
        for count in (2 * groups, groups)
    )
    every = torch.ones(2 * groups, dtype=torch.bool)
    return Trial(weights, batch, other, every, every[:groups])


def mutated(subject: Subject, trial: Trial, rng: np.random.Generator) -> Trial:
    """Return candidates near others."""
    kind = rng.integers(6)
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
    if kind == 3:
        if rng.random() < 0.5:
            other = trial.other[0], _mislabelled(trial.other[1], rng)
            return replace(trial, other=other)
        targets = _mislabelled(trial.batch[1], rng)
        return replace(trial, batch=(trial.batch[0], targets))
    if kind == 4:
        form = FORMS[rng.integers(3)]
        return replace(trial, seed=int(rng.integers(2**31)), form=form)
    other = typed(subject.draw(trial.groups, rng), trial.weights[0].dtype)
    return replace(trial, other=(hostile(other[0], rng), other[1]))


def typed(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return the batch with floating-point values of the model's type."""
    inputs, targets = (
        part.to(dtype) if part.is_floating_point() else part for part in batch
    )
    return inputs, targets


def _mislabelled(targets: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Return targets of which some are wrong."""
    if targets.is_floating_point():
        return hostile(targets, rng)
    return misplaced(targets, rng)


def _first_repeated(part: torch.Tensor) -> torch.Tensor:
    return part[:1].expand_as(part).clone()
