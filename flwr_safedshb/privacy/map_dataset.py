"""Examples that are read one by one, from items of any kind.

Items may be pairs or dicts (Hugging Face, flwr-datasets), their parts tensors, numbers,
numpy arrays, lists of numbers, or nests of these. What cannot be told from the first
items is said in words, on the node: what the items are, and what to write.

All items must have one form: the same parts, shapes and types. No item may decide
which form that is, because then one example would decide whether the others count. So
an app gives `like`, a made-up example. Without it the first item that can be read
decides, which only a simulation may do.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sized
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_flatten
from torch.utils.data import Dataset, Subset

from flwr_safedshb.privacy.bad_examples import (
    TimePadding,
    ignore_warnings,
    log_unusable,
)
from flwr_safedshb.privacy.datasets import (
    UNREAL,
    Batch,
    DatasetError,
    DrawnBatch,
    Example,
    Examples,
    Unpack,
    concat_batches,
    describe_value,
    map_tensors,
    tensors_of,
    to_tensors,
)
from flwr_safedshb.privacy.randomness.streams import separate_streams
from flwr_safedshb.stop_signal import reraise_stop

_logger = logging.getLogger(__name__)
# How many items are read to find one that says what all look like.
_LOOK = 16
# Characters of another error's text.
_LONG = 100


class ItemExamples(Examples):
    """Items of any kind as examples; see `examples_of`."""

    def __init__(
        self,
        dataset: Dataset[object],
        target: str | None = None,
        unpack: Unpack | None = None,
        like: tuple[object, object] | None = None,
    ) -> None:
        self._dataset, self._target, self._unpack = dataset, target, unpack
        self._unread: BaseException | None = None
        self.size = len(cast(Sized, dataset))
        self.declared = like is not None
        self.like: Example | None = None
        self.like = self._read_first() if like is None else _declare(like)

    def batch(
        self, chosen: NDArray[np.int64], taken: NDArray[np.bool_] | None
    ) -> DrawnBatch:
        """Return chosen examples, and which of them count."""
        assert self.like is not None
        wanted = np.ones(len(chosen), bool) if taken is None else taken
        read: list[Example | None] = [None] * len(chosen)
        even = TimePadding()
        with ignore_warnings(), separate_streams(len(chosen)) as start:
            for place in np.flatnonzero(wanted).tolist():
                start(place)
                with even.example():
                    read[place] = self._read(int(chosen[place]))
            even.wait()
        pairs = [self.like if pair is None else pair for pair in read]
        inputs, targets = (
            concat_batches([x for x, _ in pairs]),
            concat_batches([y for _, y in pairs]),
        )
        return inputs, targets, torch.tensor([pair is not None for pair in read])

    def one(self, index: int) -> Example | None:
        """Return an example as a batch of one; None if it cannot be read."""
        try:
            return self._read(index)
        except BaseException as error:
            reraise_stop(error)
            log_unusable(1, error)
            return None

    def refuse_undeclared(self) -> None:
        """Raise a `DatasetError` if an example decided what all must look like."""
        if self.declared:
            return
        if self.like is not None:
            _logger.error("The items are like like=%s", _as_code(self.like))
        raise DatasetError(
            "nothing says what an item looks like, and no item of the data may: give "
            "like=, a made-up example such as (torch.zeros(1, 28, 28), 0); the log of "
            "this node has one that fits"
        )

    def subset(self, which: NDArray[np.int64]) -> ItemExamples:
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
        parts = to_tensors(inputs, "input"), to_tensors(target, "target")
        example = _own(parts[0]), _own(parts[1])
        if self.like is not None and _layout(example) != _layout(self.like):
            raise DatasetError(
                f"the item is {_form(example)}, and others {_form(self.like)}; give "
                "all items the same parts, types and shapes, as by padding"
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
                    f"unpack fails: {cause}; items are {describe_value(item)}"
                ) from error
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise DatasetError(
                    f"unpack returns {describe_value(pair)}; return (input, target)"
                )
            return pair[0], pair[1]
        if isinstance(item, Mapping):
            if self._target not in item:
                named = "" if self._target is None else f", and none is {self._target}"
                raise DatasetError(
                    f"items are {describe_value(item)}{named}; name the target, as in "
                    f"target={list(item)[-1]!r}, or give unpack="
                )
            rest = {key: item[key] for key in item if key != self._target}
            if not rest:
                raise DatasetError(
                    f"items are {describe_value(item)}, with nothing beside the target"
                )
            inputs = next(iter(rest.values())) if len(rest) == 1 else rest
            return inputs, item[self._target]
        if self._target is not None:
            raise DatasetError(
                f"items are {describe_value(item)}, and target={self._target!r} is for "
                "dicts; leave it out, or give unpack="
            )
        if isinstance(item, tuple | list) and len(item) == 2:
            return item[0], item[1]
        raise DatasetError(
            f"items are {describe_value(item)}, and not pairs (input, target); say "
            "which is which, as in unpack=lambda item: (item[0], item[1])"
        )

    def _read_first(self) -> Example | None:
        """Return the first example that can be read, or say what is wrong with it."""
        for index in range(min(self.size, _LOOK)):
            try:
                return self._read(index)
            except DatasetError:
                raise
            except BaseException as error:  # of the dataset's own
                reraise_stop(error)
                self._unread = self._unread or error
        later = (self.one(index) for index in range(_LOOK, self.size))
        return next((one for one in later if one is not None), None)

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


def _declare(like: tuple[object, object]) -> Example:
    """Return a made-up example, as a batch of one."""
    if not isinstance(like, tuple | list) or len(like) != 2:
        raise DatasetError(
            f"like is {describe_value(like)}; give (input, target), made up"
        )
    parts = to_tensors(like[0], "input of like"), to_tensors(like[1], "target of like")
    return _own(parts[0]), _own(parts[1])


def _own(part: Batch) -> Batch:
    """Return a part of an item as a batch of one, in memory that nobody else has.

    A dataset may give the same memory again for its next item, and tensors of a kind of
    its own.
    """

    def copy_plain(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().as_subclass(torch.Tensor).clone().unsqueeze(0)

    return map_tensors(copy_plain, part)


def _layout(example: Example) -> tuple[object, ...]:
    """Return all in which examples must be equal to be parts of one batch."""
    leaves, structure = tree_flatten(example)
    kinds = [
        (leaf.shape, leaf.dtype, leaf.device, leaf.layout)
        if isinstance(leaf, torch.Tensor)
        else type(leaf)
        for leaf in leaves
    ]
    return structure, *kinds


def _as_code(value: object) -> str:
    """Return Python that makes an example of the same form."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_as_code(v)}' for key, v in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_as_code, value))})"
    assert isinstance(value, torch.Tensor)
    shape = ", ".join(map(str, value.shape[1:])) or "()"
    kind = "" if value.dtype == torch.float32 else f", dtype={value.dtype}"
    return f"torch.zeros({shape}{kind})"


def _form(value: object) -> str:
    """Return how an example is built, and of tensors of which type and shape."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_form(v)}' for key, v in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_form, value))})"
    assert isinstance(value, torch.Tensor)
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape[1:])}"
