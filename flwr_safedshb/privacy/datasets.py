"""A client's examples: the rows of arrays, or the items of a dataset of any kind.

Items may be pairs or dicts (Hugging Face, flwr-datasets), their parts tensors, numbers,
numpy arrays, lists of numbers, or nests of these. All items must have one form: the
same parts, shapes and types. No item may decide which form that is, because then one
example would decide whether the others count. So an app declares the form by `like`, a
made-up example. Without it the first readable item decides, which only a simulation
may do.
"""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torch.utils.weak import WeakTensorKeyDictionary

from flwr_safedshb.privacy.bad_examples import (
    TimePadding,
    describe_cause,
    ignore_warnings,
    log_unusable,
)
from flwr_safedshb.privacy.batches import (
    Batch,
    Example,
    Spec,
    concat_batches,
    describe_batch,
    describe_value,
    get_spec,
    index_batch,
    map_tensors,
    tensors_of,
    to_tensors,
)
from flwr_safedshb.privacy.batches import DatasetError as DatasetError
from flwr_safedshb.privacy.randomness.streams import separate_streams
from flwr_safedshb.stop_signal import reraise_stop

# Inputs, targets, and which of them count; None if all do.
DrawnBatch = tuple[Batch, Batch, torch.Tensor | None]
# From an item to its input and its target.
Unpack = Callable[[Any], tuple[Any, Any]]

_logger = logging.getLogger(__name__)
_NOT_FINITE = "values that are not finite; fill them in, or leave these examples out"
# Items that are tried to find a readable one.
_MAX_TRIED = 16
# Characters of another error's text.
_MAX_TEXT = 100
_finite_rows = WeakTensorKeyDictionary()


class Examples(ABC):
    """Private examples: pairs of an input and a target.

    Their number, and the form of one, are taken to be public.

    Attributes
    ----------
    size : int
    like : (inputs, targets)
        A batch of the shapes and types that examples have.
    """

    size: int
    like: Example
    # All of the data; None if they are read one by one.
    tensors: list[torch.Tensor] | None = None

    def refuse_undeclared(self) -> None:  # noqa: B027  # arrays declare themselves
        """Raise a `DatasetError` if an example decided the form of all."""

    @abstractmethod
    def read_batch(
        self, chosen: NDArray[np.int64], taken: NDArray[np.bool_] | None = None
    ) -> DrawnBatch:
        """Return chosen examples, and which count: those `taken` that can be used.

        An example that cannot be read, or has another form than the others, keeps its
        place, and something of the right form stands there.
        """

    @abstractmethod
    def read_one(self, index: int) -> Example | None:
        """Return an example as a batch of one; None if it cannot be used."""

    @abstractmethod
    def select(self, which: NDArray[np.int64]) -> Examples:
        """Return the examples at some indices."""


class ArrayExamples(Examples):
    """Examples as the rows of tensors, or of nests of them.

    Rows with values that are not finite are found when it is made, and are empty places
    of every batch from then on.
    """

    def __init__(self, inputs: Batch, targets: Batch) -> None:
        self.like = inputs, targets
        self.tensors: list[torch.Tensor] = tensors_of(inputs, targets)
        sizes = {len(tensor) if tensor.dim() else 0 for tensor in self.tensors}
        if len(sizes) != 1:
            raise DatasetError(
                "inputs and targets must have an example in every row, and as many "
                f"rows; they have {', '.join(map(str, sorted(sizes)))}"
            )
        (self.size,) = sizes
        self._usable = _find_usable_rows(self.tensors)

    def read_batch(
        self, chosen: NDArray[np.int64], taken: NDArray[np.bool_] | None = None
    ) -> DrawnBatch:
        """Return chosen examples, and which count: those `taken` that can be used."""
        if self._usable is not None:
            good = self._usable[chosen]
            # What stands in an empty place must cost the time of any other.
            chosen = np.where(good, chosen, self._usable.argmax())
            taken = good if taken is None else taken & good
        inputs, targets = self._index_rows(torch.from_numpy(chosen))
        return inputs, targets, None if taken is None else torch.from_numpy(taken)

    def find_usable(self) -> NDArray[np.bool_]:
        """Return which rows hold finite values only, (m,)."""
        return np.ones(self.size, bool) if self._usable is None else self._usable

    def read_one(self, index: int) -> Example | None:
        """Return an example as a batch of one; None if it cannot be used."""
        if self._usable is not None and not self._usable[index]:
            return None
        return self._index_rows(slice(index, index + 1))

    def select(self, which: NDArray[np.int64]) -> ArrayExamples:
        """Return the examples at some indices."""
        return ArrayExamples(*self._index_rows(torch.from_numpy(which)))

    def _index_rows(self, which: torch.Tensor | slice) -> Example:
        inputs, targets = self.like
        return index_batch(inputs, which), index_batch(targets, which)


def _find_usable_rows(tensors: Sequence[torch.Tensor]) -> NDArray[np.bool_] | None:
    """Return which rows hold finite values only, (m,); None if all do.

    The answer is cached for each tensor, because apps pass the same arrays with every
    message; how many rows are unusable is logged the first time.
    """
    new = [tensor for tensor in tensors if tensor not in _finite_rows]
    for tensor in new:
        finite = tensor.isfinite() if not tensor.sum().isfinite() else None
        if finite is not None:
            finite = finite.reshape(len(tensor), -1).all(dim=1).cpu()
        _finite_rows[tensor] = None if finite is None or finite.all() else finite
    found = [_finite_rows[t] for t in tensors if _finite_rows[t] is not None]
    if not found:
        return None
    usable: NDArray[np.bool_] = torch.stack(found).all(dim=0).numpy()
    if new:
        log_unusable(int((~usable).sum()), ValueError(_NOT_FINITE))
    return usable


class ItemExamples(Examples):
    """Examples as the items of a dataset, read one by one; see `make_examples`."""

    def __init__(
        self,
        dataset: Dataset[object],
        target: str | None = None,
        unpack: Unpack | None = None,
        like: tuple[object, object] | None = None,
        omit: str | None = None,
    ) -> None:
        self._dataset, self._target, self._unpack = dataset, target, unpack
        self._omit = omit
        self.size = len(cast(Sized, dataset))
        self._declared = like is not None
        self._spec: Spec | None = None  # until the form is known
        if like is None:
            self.like = self._read_first()
        elif isinstance(like, tuple | list) and len(like) == 2:
            self.like = _make_example(like[0], like[1], " of like")
        else:
            raise DatasetError(
                f"like is {describe_value(like)}; give (input, target), made up"
            )
        self._spec = get_spec(*self.like)

    def read_batch(
        self, chosen: NDArray[np.int64], taken: NDArray[np.bool_] | None = None
    ) -> DrawnBatch:
        """Return chosen examples, and which count: those `taken` that can be used."""
        wanted = np.ones(len(chosen), bool) if taken is None else taken
        read: list[Example | None] = [None] * len(chosen)
        padding = TimePadding()
        with ignore_warnings(), separate_streams(len(chosen)) as start_stream:
            for place in np.flatnonzero(wanted).tolist():
                start_stream(place)
                with padding.time_example():
                    read[place] = self._read(int(chosen[place]))
            padding.wait()
        pairs = [self.like if pair is None else pair for pair in read]
        inputs = concat_batches([inputs for inputs, _ in pairs])
        targets = concat_batches([targets for _, targets in pairs])
        return inputs, targets, torch.tensor([pair is not None for pair in read])

    def read_one(self, index: int) -> Example | None:
        """Return an example as a batch of one; None if it cannot be used."""
        try:
            return self._read(index)
        except BaseException as error:
            reraise_stop(error)
            log_unusable(1, error)
            return None

    def refuse_undeclared(self) -> None:
        """Raise a `DatasetError` if an example decided the form of all."""
        if self._declared:
            return
        _logger.error("A made-up example that fits is like=%s", _as_code(self.like))
        raise DatasetError(
            "no item of private data may decide the form of all items; give like=, a "
            "made-up example such as (torch.zeros(1, 28, 28), 0); the log of this node "
            "has one that fits"
        )

    def select(self, which: NDArray[np.int64]) -> ItemExamples:
        """Return the examples at some indices, of the same form."""
        part = copy.copy(self)
        part._dataset = Subset(self._dataset, which.tolist())
        part.size = len(which)
        return part

    def _read_first(self) -> Example:
        """Return the first readable item, which decides the form of all."""
        failure: BaseException | None = None
        for index in range(min(self.size, _MAX_TRIED)):
            try:
                return self._read(index)
            except DatasetError:
                raise
            except BaseException as error:  # of the dataset's own
                reraise_stop(error)
                failure = failure or error
        if failure is None:
            raise DatasetError("the dataset has no items")
        raise DatasetError(
            "none of the first items can be read: " + describe_cause(failure, _MAX_TEXT)
        ) from failure

    def _read(self, index: int) -> Example:
        """Return an example; raise if it has another form than the others."""
        example = _make_example(*self._split_item(self._dataset[index]))
        if self._spec is not None and get_spec(*example) != self._spec:
            raise DatasetError(
                f"the item is {describe_batch(example)}, and others "
                f"{describe_batch(self.like)}; give all items the same parts, types "
                "and shapes, for example by padding"
            )
        # Such an example could only count as zero, without a word.
        if not all(tensor.isfinite().all() for tensor in tensors_of(*example)):
            raise ValueError(_NOT_FINITE)
        return example

    def _split_item(self, item: object) -> tuple[object, object]:
        """Return the input and the target of an item."""
        what = f"items are {describe_value(item)}"
        if self._unpack is not None:
            try:
                pair = self._unpack(item)
            except Exception as error:
                cause = f"{type(error).__name__}: {str(error)[:_MAX_TEXT]}"
                raise DatasetError(f"unpack fails: {cause}; {what}") from error
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise DatasetError(
                    f"unpack returns {describe_value(pair)}; return (input, target)"
                )
            return pair[0], pair[1]
        if isinstance(item, Mapping):
            if self._target not in item:
                named = "" if self._target is None else f", and none is {self._target}"
                raise DatasetError(
                    f"{what}{named}; name the target, as in "
                    f"target={list(item)[-1]!r}, or give unpack="
                )
            others = item.keys() - {self._target, self._omit}
            rest = {key: item[key] for key in item if key in others}
            if not rest:
                raise DatasetError(f"{what}, with nothing beside the target")
            inputs = next(iter(rest.values())) if len(rest) == 1 else rest
            return inputs, item[self._target]
        if self._target is not None:
            raise DatasetError(
                f"{what}, and target={self._target!r} is for dicts; leave it out, or "
                "give unpack="
            )
        if isinstance(item, tuple | list) and len(item) == 2:
            return item[0], item[1]
        raise DatasetError(
            f"{what}, and not pairs (input, target); say which is which, as in "
            "unpack=lambda item: (item[0], item[1])"
        )


def make_examples(
    dataset: object,
    target: str | None = None,
    unpack: Unpack | None = None,
    like: tuple[object, object] | None = None,
    omit: str | None = None,
) -> Examples:
    """Wrap a dataset of any kind as `Examples`.

    Parameters
    ----------
    dataset : Dataset, sequence, or pair of arrays
    target : str, optional
        Of items that are dicts, the key of the target. The rest is the input: the value
        itself if it is one, else a dict, which the model gets as keywords.
    unpack : callable, optional
        From an item of any other kind to its input and its target.
    like : (input, target), optional
        Of items, a made-up example: its shapes and types are those of all.
    omit : str, optional
        Of items that are dicts, a key that is no input.

    Raises
    ------
    DatasetError
        If the first items have another form; says which, and the remedy.
    """
    if isinstance(dataset, Examples):
        return dataset
    if target is not None and unpack is not None:
        raise DatasetError("give target or unpack, not both: unpack returns the target")
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2 and not unpack:
        dataset = dataset.tensors
    if _is_pair_of_arrays(dataset):
        if target is not None or unpack is not None or like is not None:
            raise DatasetError(
                "a pair (inputs, targets) takes no target, no unpack and no like"
            )
        inputs, targets = cast(Sequence[object], dataset)
        return ArrayExamples(
            to_tensors(inputs, "inputs"), to_tensors(targets, "targets")
        )
    if isinstance(dataset, DataLoader):
        raise DatasetError(
            "dataset is a DataLoader; give what it loads, loader.dataset: the plan "
            "draws the batches itself, because how they are drawn decides the privacy"
        )
    indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not indexed or isinstance(dataset, IterableDataset | Mapping):
        raise DatasetError(
            f"dataset is a {type(dataset).__name__}, whose items have no numbers; give "
            "a list or Dataset of items, or a pair (inputs, targets) of arrays"
        )
    return ItemExamples(cast(Dataset[object], dataset), target, unpack, like, omit)


def _is_pair_of_arrays(dataset: object) -> bool:
    """Return whether a dataset is (inputs, targets), each with all examples."""
    if isinstance(dataset, tuple):
        return len(dataset) == 2
    arrays = torch.Tensor | np.ndarray
    return (
        isinstance(dataset, list)
        and len(dataset) == 2
        and all(isinstance(part, arrays) and part.ndim > 0 for part in dataset)
    )


def _make_example(inputs: object, target: object, where: str = "") -> Example:
    """Return an item as a batch of one, in memory that nobody else has.

    A dataset may reuse the memory for its next item, or return a subclass of Tensor.
    """

    def copy_plain(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().as_subclass(torch.Tensor).clone().unsqueeze(0)

    return (
        map_tensors(copy_plain, to_tensors(inputs, f"input{where}")),
        map_tensors(copy_plain, to_tensors(target, f"target{where}")),
    )


def _as_code(value: object) -> str:
    """Return Python code that makes an example of the same form."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_as_code(v)}' for key, v in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_as_code, value))})"
    assert isinstance(value, torch.Tensor)
    shape = ", ".join(map(str, value.shape[1:])) or "()"
    dtype = "" if value.dtype == torch.float32 else f", dtype={value.dtype}"
    return f"torch.zeros({shape}{dtype})"
