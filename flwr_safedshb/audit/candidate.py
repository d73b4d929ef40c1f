"""One candidate of the sensitivity search: weights, batches, and an example to swap."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from flwr_safedshb.audit.hostile_values import (
    QUIET,
    WILD,
    draw_hostile,
    misplace_indices,
)
from flwr_safedshb.audit.target_model import Batch, TargetModel
from flwr_safedshb.privacy.datasets import (
    ArrayExamples,
    DrawnBatch,
    Examples,
    ItemExamples,
)
from flwr_safedshb.privacy.owners import OwnedExamples
from flwr_safedshb.privacy.randomness.noise import SeededRandomness

# The form of a client's examples: a ready batch, whole arrays, or items.
Form = Literal["batch", "arrays", "items"]
FORMS: tuple[Form, ...] = ("batch", "arrays", "items")

# Batch sizes (one example alone, few, and many that add up their rounding), and how
# many batches of a size are measured at once, with the same weights.
NUM_BATCHES = {1: 72, 2: 48, 3: 36, 5: 24, 8: 15, 33: 3}
_SIZE_SHARES = (0.25, 0.25, 0.2, 0.15, 0.1, 0.05)


@dataclass(frozen=True)
class Candidate:
    """Neighbouring batches under the same weights.

    Attributes
    ----------
    weights : list of Tensor
        All floating-point entries of the model's state, as the server sends them.
    batch : (inputs, targets)
        `num_batches` batches of k examples in a row, or of k persons with K each.
    replacements : (inputs, targets)
        For each batch, the example that replaces its first one, or the K examples that
        replace those of its first person.
    usable : Tensor of bool, as long as the batches
        False for empty places of the batches; the first place of each is never empty.
    readable : Tensor of bool, as long as the replacements
        Which of the replacements can be read.
    seed : int
        Seeds torch's generator in every pass.
    form : {"batch", "arrays", "items"}
        How the clipper gets the examples.
    per_owner : int
        K.
    """

    weights: list[torch.Tensor]
    batch: Batch
    replacements: Batch
    usable: torch.Tensor
    readable: torch.Tensor
    seed: int = 1
    form: Form = "batch"
    per_owner: int = 1

    @property
    def num_batches(self) -> int:
        """The number of batches."""
        return len(self.replacements[1]) // self.per_owner

    @property
    def first_batch(self) -> Batch:
        """The first batch."""
        count = len(self.batch[1]) // self.num_batches
        return self.batch[0][:count], self.batch[1][:count]

    @property
    def _is_first(self) -> torch.Tensor:
        count = len(self.batch[1])
        return torch.arange(count) % (count // self.num_batches) < self.per_owner

    def replace_firsts(self) -> tuple[Batch, torch.Tensor]:
        """Return the batches with each first example replaced, and usable places."""
        inputs, targets = (part.clone() for part in self.batch)
        inputs[self._is_first], targets[self._is_first] = self.replacements
        usable = self.usable.clone()
        usable[self._is_first] = self.readable
        return (inputs, targets), usable

    def remove_firsts(self) -> tuple[Batch, torch.Tensor]:
        """Return the batches with an empty place (holding the replacement) first."""
        return self.replace_firsts()[0], self.usable & ~self._is_first

    def read(self, batch: Batch, usable: torch.Tensor) -> DrawnBatch:
        """Return a batch as a client reads it, with its usable places.

        Parameters
        ----------
        batch : (inputs, targets)
        usable : Tensor of bool, shape (k,)
            False for places that were not drawn, or, with items, that cannot be read.
        """
        inputs, targets = batch
        indices = np.arange(len(targets))
        if self.per_owner > 1 and self.form != "batch":
            return self._read_persons(batch, usable)
        if self.form == "arrays":
            return ArrayExamples(inputs, targets).read_batch(indices, usable.numpy())
        if self.form == "items":
            like = torch.zeros_like(inputs[0]), torch.zeros_like(targets[0])
            items = ItemExamples(UnreadableItems(batch, usable), like=like)
            return items.read_batch(indices)
        return inputs.clone(), targets.clone(), usable

    def _read_persons(self, batch: Batch, usable: torch.Tensor) -> DrawnBatch:
        """Return a batch of persons as a client reads it.

        With arrays, an example that is not usable is nobody's; so persons have fewer.
        """
        inputs, targets = batch
        count = len(targets) // self.per_owner
        owners = np.arange(len(targets)) // self.per_owner
        examples: Examples = ArrayExamples(inputs, targets)
        if self.form == "arrays":
            owners = np.where(usable.numpy(), owners, -1)
        else:
            like = torch.zeros_like(inputs[0]), torch.zeros_like(targets[0])
            examples = ItemExamples(UnreadableItems(batch, usable), like=like)
        persons = OwnedExamples(examples, owners, count, self.per_owner)
        randomness = SeededRandomness(self.seed)
        return persons.read_batch(np.arange(count), None, randomness)


class UnreadableItems(Dataset[object]):
    """Pairs of rows, some of which cannot be read."""

    def __init__(self, batch: Batch, usable: torch.Tensor) -> None:
        self._batch, self._usable = batch, usable.tolist()

    def __len__(self) -> int:
        return len(self._usable)

    def __getitem__(self, index: int) -> object:
        if not self._usable[index]:
            raise OSError("this item cannot be read, on purpose")
        inputs, targets = self._batch
        return inputs[index], targets[index]


def float_entries(model: nn.Module) -> list[torch.Tensor]:
    """Return the floating-point entries of a model's state, sharing its memory."""
    state = model.state_dict(keep_vars=True).values()
    return [entry.detach() for entry in state if entry.is_floating_point()]


def load_entries(model: nn.Module, weights: list[torch.Tensor]) -> None:
    """Copy weights into a model's floating-point entries."""
    with torch.no_grad():
        for entry, given in zip(float_entries(model), weights, strict=True):
            entry.copy_(given)


def cast_batch(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return the batch with its floating-point values in the model's type."""
    inputs, targets = (
        part.to(dtype) if part.is_floating_point() else part for part in batch
    )
    return inputs, targets


def draw_ordinary(
    target: TargetModel, weights: list[torch.Tensor], rng: np.random.Generator
) -> Candidate:
    """Return batches of two as they occur in ordinary training."""
    places = target.per_owner
    count = min(NUM_BATCHES[2], target.max_batches) * places
    batch = cast_batch(target.draw(2 * count, rng), weights[0].dtype)
    replacements = cast_batch(target.draw(count, rng), weights[0].dtype)
    usable = torch.ones(2 * count, dtype=torch.bool)
    return Candidate(
        weights, batch, replacements, usable, usable[:count], per_owner=places
    )


def draw_candidate(
    target: TargetModel, weights: list[torch.Tensor], rng: np.random.Generator
) -> Candidate:
    """Return a random hostile candidate, made from `weights` and drawn examples."""
    dtype = weights[0].dtype
    shares = QUIET if rng.random() < 0.4 else WILD
    # One time in four the weights stay as they are, and one in four the data do.
    if rng.random() < 0.75:
        weights = [draw_hostile(weight, rng, shares) for weight in weights]
    size = int(rng.choice(list(NUM_BATCHES), p=_SIZE_SHARES))
    # Now and then one batch alone, as a client has it.
    count = min(NUM_BATCHES[size], target.max_batches) if rng.random() < 0.9 else 1
    places = target.per_owner
    size *= places
    inputs, targets = cast_batch(target.draw(count * size, rng), dtype)
    batches = list(
        zip(torch.split(inputs, size), torch.split(targets, size), strict=True)
    )
    for i, (rows, labels) in enumerate(batches):
        if rng.random() < 0.75:
            batches[i] = draw_hostile(rows, rng, shares), labels
        if rng.random() < 0.3:  # many that pull the same way
            batches[i] = _repeat_first(batches[i][0]), _repeat_first(labels)
    inputs, targets = map(torch.cat, zip(*batches, strict=True))
    if rng.random() < 0.3:
        targets = _mislabel(targets, rng)
    if places > 1 and rng.random() < 0.3:  # persons whose examples may cancel
        inputs[1::2] = inputs[: len(inputs) // 2 * 2 : 2]
    replacements = cast_batch(target.draw(count * places, rng), dtype)
    if rng.random() < 0.5:
        replacements = draw_hostile(replacements[0], rng), replacements[1]
    elif rng.random() < 0.5:  # opposites, as far away as it gets
        firsts = inputs.view(count, size, *inputs.shape[1:])[:, :places].flatten(0, 1)
        opposites = -firsts if firsts.is_floating_point() else firsts
        replacements = opposites, replacements[1]
    if rng.random() < 0.3:
        replacements = replacements[0], _mislabel(replacements[1], rng)
    usable, readable = (
        torch.ones(len(targets), dtype=torch.bool),
        rng.random(count * places),
    )
    if size > 1 and rng.random() < 0.3:
        usable = torch.from_numpy(rng.random(len(targets)) < 0.7)
        usable[::size] = True
    return Candidate(
        weights,
        (inputs, targets),
        replacements,
        usable,
        torch.from_numpy(readable < 0.9),
        int(rng.integers(2**31)),
        FORMS[rng.choice(3, p=(0.5, 0.25, 0.25))],
        places,
    )


def mutate_candidate(
    target: TargetModel, parent: Candidate, rng: np.random.Generator
) -> Candidate:
    """Return a candidate that differs from its parent in one respect."""
    kind = rng.integers(6)
    if kind == 0:
        weights = list(parent.weights)
        place = int(rng.integers(len(weights)))
        weights[place] = draw_hostile(weights[place], rng)
        return replace(parent, weights=weights)
    if kind == 1:
        inputs, targets = parent.batch
        return replace(parent, batch=(draw_hostile(inputs, rng), targets))
    if kind == 2:
        powers = 2.0 ** rng.integers(-4, 5, size=len(parent.weights))
        weights = [w * float(p) for w, p in zip(parent.weights, powers, strict=True)]
        return replace(parent, weights=weights)
    if kind == 3:
        if rng.random() < 0.5:
            inputs, targets = parent.replacements
            return replace(parent, replacements=(inputs, _mislabel(targets, rng)))
        inputs, targets = parent.batch
        return replace(parent, batch=(inputs, _mislabel(targets, rng)))
    if kind == 4:
        form = FORMS[rng.integers(3)]
        return replace(parent, seed=int(rng.integers(2**31)), form=form)
    drawn = target.draw(len(parent.replacements[1]), rng)
    inputs, targets = cast_batch(drawn, parent.weights[0].dtype)
    return replace(parent, replacements=(draw_hostile(inputs, rng), targets))


def _mislabel(targets: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Return targets, some of which are wrong."""
    if targets.is_floating_point():
        return draw_hostile(targets, rng)
    return misplace_indices(targets, rng)


def _repeat_first(part: torch.Tensor) -> torch.Tensor:
    return part[:1].expand_as(part).clone()
