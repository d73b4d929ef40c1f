"""Examples that are read one by one, from items of any kind.

Items may be pairs or dicts (Hugging Face, flwr-datasets), their parts tensors, numbers,
numpy arrays, lists of numbers, or nests of these. What cannot be told from the first
items is said in words, on the node: what the items are, and what to write.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sized
from itertools import islice
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, Subset

from flwr_safedshb.privacy.examples import (
    UNREAL,
    DatasetError,
    Drawn,
    Example,
    Examples,
    Unpack,
    as_batch,
    joined,
    kind_of,
    nest_of,
    tensors_of,
)
from flwr_safedshb.privacy.unusable import log_unusable, unwarned

# Items that decide what all look like, and how many are read to find them.
_DECIDE, _LOOK = 3, 16
# Characters of another error's text.
_LONG = 100


class Items(Examples):
    """Items of any kind as examples; see `examples_of`."""

    def __init__(
        self,
        dataset: Dataset[object],
        target: str | None = None,
        unpack: Unpack | None = None,
    ) -> None:
        self._dataset, self._target, self._unpack = dataset, target, unpack
        self._form: str | None = None
        self._unread: Exception | None = None
        self.size = len(cast(Sized, dataset))
        self.like = self._typical()

    def batch(
        self, chosen: NDArray[np.int64], taken: NDArray[np.bool_] | None
    ) -> Drawn:
        """Return chosen examples, and which of them count."""
        assert self.like is not None
        wanted = np.ones(len(chosen), bool) if taken is None else taken
        both = zip(chosen.tolist(), wanted, strict=True)
        with unwarned():
            read = [self.one(index) if drawn else None for index, drawn in both]
        pairs = [self.like if pair is None else pair for pair in read]
        inputs, targets = joined([x for x, _ in pairs]), joined([y for _, y in pairs])
        return inputs, targets, torch.tensor([pair is not None for pair in read])

    def one(self, index: int) -> Example | None:
        """Return an example as a batch of one; None if it cannot be read."""
        try:
            return self._read(index)
        except Exception as error:
            log_unusable(1, error)
            return None

    def some(self, which: NDArray[np.int64]) -> Items:
        """Return the examples at these places, which look like all of them."""
        part = copy.copy(self)
        part._dataset = Subset(self._dataset, which.tolist())
        part.size = len(which)
        return part

    def _read(self, index: int) -> Example:
        """Return an example; raises if it is built otherwise than the first ones.

        What has values like NaN is none either: it could only count as zero, unsaid.
        """
        inputs, target = self._split(self._dataset[index])
        parts = nest_of(inputs, "input"), nest_of(target, "target")
        example = as_batch(parts[0]), as_batch(parts[1])
        if self._form is not None and _form(example) != self._form:
            raise DatasetError(
                f"the item is {_form(example)}, and others {self._form}; give all "
                "items the same parts, types and shapes, as by padding"
            )
        if not all(tensor.isfinite().all() for tensor in tensors_of(*example)):
            raise ValueError(UNREAL)
        return example

    def _split(self, item: object) -> tuple[object, object]:
        if self._unpack is not None:
            try:
                pair = self._unpack(item)
            except Exception as error:
                cause = f"{type(error).__name__}: {str(error)[:_LONG]}"
                raise DatasetError(
                    f"unpack fails: {cause}; items are {kind_of(item)}"
                ) from error
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise DatasetError(
                    f"unpack returns {kind_of(pair)}; return (input, target)"
                )
            return pair[0], pair[1]
        if isinstance(item, Mapping):
            if self._target not in item:
                named = "" if self._target is None else f", and none is {self._target}"
                raise DatasetError(
                    f"items are {kind_of(item)}{named}; name the target, as in "
                    f"target={list(item)[-1]!r}, or give unpack="
                )
            rest = {key: item[key] for key in item if key != self._target}
            if not rest:
                raise DatasetError(
                    f"items are {kind_of(item)}, and nothing is left beside the target"
                )
            inputs = next(iter(rest.values())) if len(rest) == 1 else rest
            return inputs, item[self._target]
        if self._target is not None:
            raise DatasetError(
                f"items are {kind_of(item)}, and target={self._target!r} is for dicts; "
                "leave it out, or give unpack="
            )
        if isinstance(item, tuple | list) and len(item) == 2:
            return item[0], item[1]
        raise DatasetError(
            f"items are {kind_of(item)}, and not pairs (input, target); say which is "
            "which, as in unpack=lambda item: (item[0], item[1])"
        )

    def _typical(self) -> Example | None:
        """Return an example like most of the first ones, or say what is wrong."""
        found: list[tuple[str, Example | DatasetError]] = []
        unread: Exception | None = None
        for index in range(min(self.size, _LOOK)):
            try:
                example = self._read(index)
                found.append((_form(example), example))
            except DatasetError as error:
                found.append((str(error), error))
            except Exception as error:  # of the dataset's own
                unread = error
            if len(found) == _DECIDE:
                break
        if not found:
            self._unread = unread
            later = (self.one(index) for index in range(_LOOK, self.size))
            read = islice((one for one in later if one is not None), _DECIDE)
            found = [(_form(one), one) for one in read]
        if not found:
            return None
        forms = [form for form, _ in found]
        self._form = max(forms, key=forms.count)
        _, chosen = found[forms.index(self._form)]
        if isinstance(chosen, DatasetError):
            raise chosen
        return chosen

    def refuse_unread(self, shown: bool) -> None:
        """Say that none of the first items can be read, and why where that is `shown`.

        Elsewhere there is an answer all the same: that there is none would say
        something.
        """
        if self._unread is None:
            return
        if not shown:
            log_unusable(min(self.size, _LOOK), self._unread)
            return
        text = f"{type(self._unread).__name__}: {str(self._unread)[:_LONG]}"
        raise DatasetError(
            f"none of the first items can be read: {text}"
        ) from self._unread


def _form(value: object) -> str:
    """Return how an example is built, and of tensors of which type and shape."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_form(v)}' for key, v in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_form, value))})"
    assert isinstance(value, torch.Tensor)
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape[1:])}"
