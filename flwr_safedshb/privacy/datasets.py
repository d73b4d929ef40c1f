"""A client's examples: whole arrays, or items of any kind, as batches of them.

A batch is a tensor with examples on the first axis, or a nest of such tensors: dicts,
lists and tuples, as `torch.vmap` takes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.weak import WeakTensorKeyDictionary

from flwr_safedshb.privacy.bad_examples import log_unusable

Batch: TypeAlias = "torch.Tensor | Sequence[Batch] | Mapping[str, Batch]"
# How a nest is built; of every tensor the shape, without the first axis, and type.
Spec: TypeAlias = tuple[object, ...]
Example = tuple[Batch, Batch]
# Inputs, targets, and which of them count, if not all.
DrawnBatch = tuple[Batch, Batch, torch.Tensor | None]
# From an item to its input and its target.
Unpack = Callable[[Any], tuple[Any, Any]]

UNREAL = "values that are not finite; fill them in, or leave these examples out"
# What numpy makes an array of numbers of, if it holds nothing else.
_PLAIN = (bool, int, float, np.generic, np.ndarray, tuple, list)
# Keys of a dict that an error quotes.
_TOLD = 8
_finite_rows = WeakTensorKeyDictionary()


class DatasetError(ValueError):
    """Input and target of the examples cannot be told; says what they are instead."""


class Examples(ABC):
    """Private examples: pairs of an input and a target.

    Their number, and the shape and type of one, are taken to be public.

    Attributes
    ----------
    size : int
    like : (inputs, targets), or None
        A batch with the shape and type that examples have; None if none can be read.
    declared : bool
        Whether `like` depends on no example, as privacy needs.
    """

    size: int
    like: Example | None
    declared: bool = True

    def refuse_undeclared(self) -> None:  # noqa: B027  # arrays declare themselves
        """Raise a `DatasetError` if an example decided what all must look like."""

    @abstractmethod
    def batch(
        self, chosen: NDArray[np.int64], taken: NDArray[np.bool_] | None
    ) -> DrawnBatch:
        """Return chosen examples, and which of them count: those that are `taken`.

        One that cannot be read, or that is unlike the others in shape or type, keeps
        its place, which another then fills.
        """

    @abstractmethod
    def one(self, index: int) -> Example | None:
        """Return an example as a batch of one; None if it cannot be read."""

    @abstractmethod
    def subset(self, which: NDArray[np.int64]) -> Examples:
        """Return the examples at these places."""


class ArrayExamples(Examples):
    """Examples as the rows of tensors, or of nests of them.

    Rows with values that are not finite are found when it is made, and are empty places
    of every batch from then on.
    """

    def __init__(self, inputs: Batch, targets: Batch) -> None:
        self.like: Example = inputs, targets
        self.tensors = tensors_of(inputs, targets)
        sizes = {len(tensor) if tensor.dim() else 0 for tensor in self.tensors}
        if len(sizes) != 1:
            raise DatasetError(
                "inputs and targets must have an example in every row, and as many "
                f"rows; they have {', '.join(map(str, sorted(sizes)))}"
            )
        (self.size,) = sizes
        self._usable = _find_usable_rows(self.tensors)

    def batch(
        self, chosen: NDArray[np.int64], taken: NDArray[np.bool_] | None
    ) -> DrawnBatch:
        """Return chosen examples, and which count: those taken that can be used."""
        if self._usable is not None:
            good = self._usable[chosen]
            # What stands in an empty place must cost the time of any other.
            chosen = np.where(good, chosen, self._usable.argmax())
            taken = good if taken is None else taken & good
        inputs, targets = self._rows(torch.from_numpy(chosen))
        return inputs, targets, None if taken is None else torch.from_numpy(taken)

    def one(self, index: int) -> Example | None:
        """Return an example as a batch of one; None if it cannot be used."""
        if self._usable is not None and not self._usable[index]:
            return None
        return self._rows(slice(index, index + 1))

    def subset(self, which: NDArray[np.int64]) -> ArrayExamples:
        """Return the examples at these places."""
        return ArrayExamples(*self._rows(torch.from_numpy(which)))

    def _rows(self, which: torch.Tensor | slice) -> Example:
        inputs, targets = self.like
        return index_batch(inputs, which), index_batch(targets, which)


def make_examples(
    dataset: object,
    target: str | None = None,
    unpack: Unpack | None = None,
    like: tuple[object, object] | None = None,
) -> Examples:
    """Return data as people have them as examples.

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

    Raises
    ------
    DatasetError
        If the first items are something else; says what they are, and the remedy.
    """
    if isinstance(dataset, Examples):
        return dataset
    if target is not None and unpack is not None:
        raise DatasetError("give target or unpack, not both: unpack returns the target")
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2 and not unpack:
        dataset = dataset.tensors
    if _is_pair(dataset):
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
    by_number = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not by_number or isinstance(dataset, IterableDataset | Mapping):
        raise DatasetError(
            f"dataset is a {type(dataset).__name__}, whose items have no numbers; give "
            "a list or Dataset of items, or a pair (inputs, targets) of arrays"
        )
    # It builds on this file.
    from flwr_safedshb.privacy.map_dataset import ItemExamples

    return ItemExamples(cast(Dataset[object], dataset), target, unpack, like)


def _find_usable_rows(tensors: Sequence[torch.Tensor]) -> NDArray[np.bool_] | None:
    """Return which rows of whole arrays have finite values only; None if all have.

    It is looked at once, because apps hand in the same arrays with every message; and
    the node's log says then how many have not.
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
        log_unusable(int((~usable).sum()), ValueError(UNREAL))
    return usable


def _is_pair(dataset: object) -> bool:
    """Say whether a dataset is inputs and targets, each as a whole."""
    if isinstance(dataset, tuple):
        return len(dataset) == 2
    arrays = torch.Tensor | np.ndarray
    return (
        isinstance(dataset, list)
        and len(dataset) == 2
        and all(isinstance(part, arrays) and part.ndim > 0 for part in dataset)
    )


def tensors_of(*batches: Batch) -> list[torch.Tensor]:
    """Return the tensors of batches; a nest may hold other things beside them."""
    if all(isinstance(batch, torch.Tensor) for batch in batches):
        return cast(list[torch.Tensor], list(batches))
    return [leaf for leaf in tree_leaves(batches) if isinstance(leaf, torch.Tensor)]


def get_spec(*batches: Batch) -> Spec:
    """Return how batches are built, shapes and types, which say nothing of values."""
    found, structure = tree_flatten(batches)
    kinds = [
        (tuple(leaf.shape[1:]), leaf.dtype) if torch.is_tensor(leaf) else type(leaf)
        for leaf in found
    ]
    return str(structure), *kinds


def index_batch(batch: Batch, which: torch.Tensor | slice) -> Batch:
    """Return some examples of a batch."""

    def some(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(which, slice):
            return tensor[which]
        # Twice as fast as an index.
        return tensor.index_select(0, which.to(tensor.device))

    return map_tensors(some, batch)


def concat_batches(batches: Sequence[Batch]) -> Batch:
    """Return one batch of all examples, which have the same `spec`."""
    return cast(
        Batch,
        tree_map(
            lambda *parts: torch.cat(parts) if torch.is_tensor(parts[0]) else parts[0],
            *batches,
        ),
    )


def unsqueeze_batch(batch: Batch, dim: int) -> Batch:
    """Return a batch whose tensors have one more axis, of length 1, at `dim`."""
    return map_tensors(lambda tensor: tensor.unsqueeze(dim), batch)


def map_tensors(
    function: Callable[[torch.Tensor], torch.Tensor], batch: Batch
) -> Batch:
    """Return a batch with the value of a function in the place of each tensor."""
    # torch's own way through a nest takes longer than most of what is done there.
    if isinstance(batch, torch.Tensor):
        return function(batch)
    return cast(Batch, tree_map_only(torch.Tensor, function, batch))


def to_tensors(value: object, name: str) -> Batch:
    """Return a value as a tensor or a nest of tensors.

    What is no tensor yet becomes one of the type that models and losses take: torch's
    usual floats, and int64.
    """
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Mapping):
        return {
            str(key): to_tensors(value[key], f"{name}[{key!r}]")
            for key in sorted(value)
        }
    if hasattr(value, "to_numpy"):  # a frame or a column of pandas
        value = value.to_numpy()
    if isinstance(value, tuple | list) and not _of_numbers(value):
        return [to_tensors(part, f"{name}[{i}]") for i, part in enumerate(value)]
    array = np.asarray(value) if isinstance(value, _PLAIN) else None
    if array is None or array.dtype.kind not in "biuf":
        raise DatasetError(
            f"the {name} is {describe_value(value)}, and no tensor, array or number; "
            "make it one in the dataset, or leave it out by unpack="
        )
    if array.dtype.kind == "f":
        return torch.from_numpy(np.array(array)).to(torch.get_default_dtype())
    wide = array.dtype.kind in "iu" and array.dtype != np.uint8
    return torch.from_numpy(np.array(array, np.int64 if wide else None))


def _of_numbers(value: Sequence[object]) -> bool:
    """Say whether a list has numbers, or lists of them, and nothing else."""
    return bool(value) and all(
        _of_numbers(part)
        if isinstance(part, tuple | list)
        else isinstance(part, bool | int | float | np.number | np.bool_)
        for part in value
    )


def describe_value(value: object) -> str:
    """Say what a value is, without its content."""
    if isinstance(value, Mapping):
        keys = list(map(str, value))
        more = f" and {len(keys) - _TOLD} more" if len(keys) > _TOLD else ""
        return f"dicts with keys {', '.join(keys[:_TOLD])}{more}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}s of {len(value)}"
    if isinstance(value, torch.Tensor | np.ndarray):
        return "single arrays"
    return f"of type {type(value).__name__}"
