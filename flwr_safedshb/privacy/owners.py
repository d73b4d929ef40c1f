"""Persons as the unit of privacy: whose examples are whose, and which are drawn.

A person owns a list of examples: visits, images, notes. Two datasets are neighbours if
they are the same list of m persons but for one of them, whose examples are exchanged
for any others, in any number. So who the persons are is public to the node's app, and m
to all, as the number of examples is elsewhere; the number of examples of a person is
not. Persons are numbered by their identifiers alone: in which order examples stand, and
how many there are, must not decide which persons are held out.

A step draws persons, and of each at most K of the examples, anew in every step. Every
drawn person has K places in the batch. An example more or less changes neither the
shapes of a batch nor how many examples are read.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from flwr_safedshb.privacy.bad_examples import log_unusable
from flwr_safedshb.privacy.batches import DatasetError, Example
from flwr_safedshb.privacy.datasets import (
    ArrayExamples,
    DrawnBatch,
    Examples,
    Unpack,
    make_examples,
)
from flwr_safedshb.privacy.randomness.noise import Randomness
from flwr_safedshb.stop_signal import reraise_stop

# Whose example each is, or the key of items under which that stands.
Owners = str | Sequence[Hashable] | NDArray[Any] | torch.Tensor

# The most places of a person: each is computed, whether there is an example or not.
_MAX_PLACES = 4096
_NOBODY = -1


class OwnedExamples:
    """Examples of persons, read person by person.

    Parameters
    ----------
    examples : Examples
    owners : ndarray of int64, shape (n,)
        The number of the person whose example each is, in range(size); -1 if it is
        nobody's, who is never drawn.
    size : int
        m, the number of persons.
    per_owner : int
        K, the places of a person in a batch.
    """

    def __init__(
        self, examples: Examples, owners: NDArray[np.int64], size: int, per_owner: int
    ) -> None:
        self._examples, self._owners = examples, owners
        self.size, self.per_owner = size, per_owner
        counted = owners != _NOBODY
        if isinstance(examples, ArrayExamples):  # items are read when they are drawn
            counted &= examples.find_usable()
        rows = np.flatnonzero(counted)
        # What stands in the places of a person without examples counts for nobody.
        self._rows = np.append(rows[np.argsort(owners[rows], kind="stable")], 0)
        self._counts = np.bincount(owners[rows], minlength=size)[:, None]
        self._starts = np.cumsum(self._counts)[:, None] - self._counts
        self._places = np.arange(per_owner)

    @property
    def examples(self) -> Examples:
        """The examples of all persons."""
        return self._examples

    @property
    def like(self) -> Example:
        """A batch of the shapes and types that examples have."""
        return self._examples.like

    @property
    def tensors(self) -> list[torch.Tensor] | None:
        """All of the data, with whose they are; None if they are read one by one."""
        if not isinstance(self._examples, ArrayExamples):
            return None
        return [*self._examples.tensors, torch.from_numpy(self._owners)]

    def refuse_undeclared(self) -> None:
        """Raise a `DatasetError` if an example decided the form of all."""
        self._examples.refuse_undeclared()

    def read_batch(
        self,
        chosen: NDArray[np.int64],
        taken: NDArray[np.bool_] | None,
        randomness: Randomness,
    ) -> DrawnBatch:
        """Return K places for each of the chosen persons, and which count.

        Parameters
        ----------
        chosen : ndarray, shape (k,)
            Persons.
        taken : ndarray of bool, shape (k,), optional
            False for a person who only fills a place.
        randomness : Randomness
            Draws the examples.
        """
        rows, present = self._draw_places(chosen, randomness)
        if taken is not None:
            taken = np.repeat(taken, self.per_owner)
            present &= taken
        # Examples are read for empty places, too: the time tells nothing.
        inputs, targets, read = self._examples.read_batch(rows, taken)
        usable = torch.from_numpy(present)
        return inputs, targets, usable if read is None else usable & read

    def draw_examples(
        self, owner: int, randomness: Randomness
    ) -> tuple[list[int], int]:
        """Return the example in each of a person's K places, and how many count.

        The first ones count; the others repeat them.
        """
        rows, present = self._draw_places(np.array([owner]), randomness)
        return rows.tolist(), int(present.sum())

    def read_one(self, index: int) -> Example | None:
        """Return an example as a batch of one; None if it cannot be used."""
        return self._examples.read_one(index)

    def select(self, which: NDArray[np.int64]) -> OwnedExamples:
        """Return the examples of some persons."""
        numbers = np.full(self.size + 1, _NOBODY)  # the last for nobody's examples
        numbers[which] = np.arange(len(which))
        owners = numbers[self._owners]
        return OwnedExamples(self._examples, owners, len(which), self.per_owner)

    def _draw_places(
        self, chosen: NDArray[np.int64], randomness: Randomness
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Draw K examples of each person, or take all; say which places are no repeats.

        Every example is as likely as any other, and no two are the same (systematic
        sampling: equal distances from a random start). A person with fewer examples
        fills the other places with the same ones, never with those of somebody else
        (`OwnerPlaces`).
        """
        counts, places = self._counts[chosen], self._places
        start = randomness.uniform(len(chosen))[:, None]
        spread = ((start + places) * (counts / self.per_owner)).astype(np.int64)
        spread = np.minimum(spread, counts - 1)
        drawn = np.where(
            counts > self.per_owner, spread, places % (counts + (counts == 0))
        )
        rows = self._rows[self._starts[chosen] + drawn]
        return rows.ravel(), (places < counts).ravel()


# What a client trains and evaluates on; its size counts examples, or persons.
PrivateData = Examples | OwnedExamples


def make_owned_examples(
    dataset: object,
    owners: Owners,
    max_per_owner: int,
    target: str | None = None,
    unpack: Unpack | None = None,
    like: tuple[object, object] | None = None,
) -> OwnedExamples:
    """Wrap a dataset whose examples belong to persons.

    Persons are numbered in the order of their identifiers. An example whose owner is
    missing (None, NaN or NA), or that cannot be read when its owner is looked up, is
    nobody's: it never trains.

    Parameters
    ----------
    dataset, target, unpack, like
        See `make_examples`.
    owners : sequence, array or column, or str
        Whose example each is: any identifiers. A text is the key of items that are
        dicts; every item is read once for it, so give an array where reading is slow.
    max_per_owner : int
        K.

    Raises
    ------
    DatasetError
        If there is not one owner for each example.
    """
    if (
        isinstance(max_per_owner, bool)
        or not isinstance(max_per_owner, int)
        or not 1 <= max_per_owner <= _MAX_PLACES
    ):
        raise ValueError(
            f"max_per_owner={max_per_owner!r} must be an integer from 1 to "
            f"{_MAX_PLACES}: how many examples of a person count in a step"
        )
    key = owners if isinstance(owners, str) else None
    examples = make_examples(dataset, target, unpack, like, omit=key)
    names = _list_owners(dataset, examples.size, owners)
    known = [_check_owner(name) for name in names]
    persons = sorted({name for name in known if name is not None}, key=_order_owner)
    numbers = {name: number for number, name in enumerate(persons)}
    codes = np.array(
        [_NOBODY if name is None else numbers[name] for name in known], np.int64
    )
    if len(codes) != examples.size:
        raise DatasetError(
            f"owners has {len(codes)} entries for {examples.size} examples; give one "
            "for each"
        )
    if not numbers:
        raise DatasetError(
            f"no example has an owner; owners={key!r} must be a key of the items"
            if key
            else "no example has an owner; owners must say whose each is"
        )
    if missing := int((codes == _NOBODY).sum()):
        log_unusable(missing, ValueError("no owner; leave these examples out"))
    return OwnedExamples(examples, codes, len(numbers), max_per_owner)


def _list_owners(dataset: object, size: int, owners: Owners) -> Iterable[object]:
    """Return whose example each is."""
    if isinstance(owners, str):
        if owners in (getattr(dataset, "column_names", None) or ()):  # Hugging Face
            return cast(Iterable[object], cast(Any, dataset)[owners])
        return [_read_owner(dataset, index, owners) for index in range(size)]
    if isinstance(owners, torch.Tensor):
        return cast(Iterable[object], owners.tolist())
    if hasattr(owners, "to_numpy"):  # a column of pandas
        owners = cast(Any, owners).to_numpy()
    if isinstance(owners, np.ndarray):
        return cast(Iterable[object], owners.tolist())
    return owners


def _read_owner(dataset: object, index: int, key: str) -> object:
    """Return whose an item is; None if it cannot be read."""
    try:
        item = cast(Any, dataset)[index]
        return item[key] if isinstance(item, Mapping) and key in item else None
    except BaseException as error:
        reraise_stop(error)
        log_unusable(1, error)
        return None


def _check_owner(name: object) -> Hashable | None:
    """Return an identifier, or None if the owner is missing."""
    if isinstance(name, torch.Tensor | np.ndarray) and name.ndim == 0:
        name = name.item()
    plain = isinstance(name, Hashable) and not isinstance(name, tuple | frozenset)
    if not plain or isinstance(name, torch.Tensor):
        raise DatasetError(
            "owners has an entry that is no identifier, such as a list of several "
            "persons; an example must have one owner: choose one, or leave it out"
        )
    if type(name).__repr__ is object.__repr__:
        raise DatasetError(
            f"owners has an entry of type {type(name).__name__}, which has no order "
            "that lasts; give numbers or texts"
        )
    try:
        return None if name is None or bool(name != name) else name
    except TypeError:  # the missing value of pandas
        return None


def _order_owner(name: Hashable) -> tuple[int, Any, str]:
    """Return what identifiers are sorted by; equal ones have equal places."""
    if isinstance(name, Real):
        return 0, name, ""
    return 1, 0, f"{type(name).__qualname__} {name!r}"
