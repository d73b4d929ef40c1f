"""Batches: tensors with examples on the first axis, or nests of such tensors.

A nest is made of dicts, lists and tuples, as `torch.vmap` takes them, and may hold
other things beside its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only

Batch: TypeAlias = "torch.Tensor | Sequence[Batch] | Mapping[str, Batch]"
# The structure of a nest; of every tensor the shape of an example, dtype and device.
Spec: TypeAlias = tuple[object, ...]
# Inputs and targets.
Example = tuple[Batch, Batch]

# Types of which numpy makes an array of numbers, if they hold nothing else.
_ARRAY_LIKE = (bool, int, float, np.generic, np.ndarray, tuple, list)
# Keys of a dict that an error quotes.
_MAX_KEYS = 8


class DatasetError(ValueError):
    """The dataset has another form than was said; tells which, and the remedy."""


def tensors_of(*batches: Batch) -> list[torch.Tensor]:
    """Return all tensors of some batches."""
    if all(isinstance(batch, torch.Tensor) for batch in batches):
        return cast(list[torch.Tensor], list(batches))
    return [leaf for leaf in tree_leaves(batches) if isinstance(leaf, torch.Tensor)]


def count_examples(batch: Batch) -> int:
    """Return the length of the first axis of a batch's tensors."""
    first = batch if isinstance(batch, torch.Tensor) else tensors_of(batch)[0]
    return first.shape[0]


def get_spec(*batches: Batch) -> Spec:
    """Return what batches must have in common to be joined; it holds no values."""
    leaves, structure = tree_flatten(batches)
    kinds = [
        (tuple(leaf.shape[1:]), leaf.dtype, leaf.device, leaf.layout)
        if isinstance(leaf, torch.Tensor)
        else type(leaf)
        for leaf in leaves
    ]
    return str(structure), *kinds


def map_tensors(
    function: Callable[[torch.Tensor], torch.Tensor], batch: Batch
) -> Batch:
    """Apply a function to every tensor of a batch."""
    # torch's tree_map takes longer than most of these functions.
    if isinstance(batch, torch.Tensor):
        return function(batch)
    return cast(Batch, tree_map_only(torch.Tensor, function, batch))


def copy_batch(batch: Batch) -> Batch:
    """Copy a batch to memory of its own."""
    return map_tensors(lambda tensor: tensor.detach().clone(), batch)


def index_batch(batch: Batch, which: torch.Tensor | slice) -> Batch:
    """Return the examples at some indices."""

    def index(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(which, slice):
            return tensor[which]
        # Twice as fast as tensor[which].
        return tensor.index_select(0, which.to(tensor.device))

    return map_tensors(index, batch)


def concat_batches(batches: Sequence[Batch]) -> Batch:
    """Join batches that have the same `get_spec`."""

    def concat(*parts: object) -> object:
        tensors = isinstance(parts[0], torch.Tensor)
        return torch.cat(cast(list[torch.Tensor], parts)) if tensors else parts[0]

    return cast(Batch, tree_map(concat, *batches))


def unsqueeze_batch(batch: Batch, dim: int) -> Batch:
    """Insert an axis of length 1 into every tensor of a batch."""
    return map_tensors(lambda tensor: tensor.unsqueeze(dim), batch)


def to_tensors(value: object, name: str) -> Batch:
    """Convert a value to a tensor or a nest of tensors.

    Anything but a tensor becomes one of the type that models and losses expect:
    torch's default float type, or int64.
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
    if isinstance(value, tuple | list) and not _holds_numbers(value):
        return [to_tensors(part, f"{name}[{i}]") for i, part in enumerate(value)]
    array = np.asarray(value) if isinstance(value, _ARRAY_LIKE) else None
    if array is None or array.dtype.kind not in "biuf":
        what = describe_value(value)
        if array is not None:
            what = f"an array of dtype {array.dtype}"
        raise DatasetError(
            f"the {name} is {what}, and a model needs numbers; convert it in the "
            "dataset (labels to integers 0..k-1, for example with sklearn's "
            "LabelEncoder), or leave it out with unpack="
        )
    if array.dtype.kind == "f":
        return torch.from_numpy(np.array(array)).to(torch.get_default_dtype())
    wide = array.dtype.kind in "iu" and array.dtype != np.uint8
    return torch.from_numpy(np.array(array, np.int64 if wide else None))


def _holds_numbers(value: Sequence[object]) -> bool:
    """Return whether a list holds numbers, or lists of numbers, and nothing else."""
    return bool(value) and all(
        _holds_numbers(part)
        if isinstance(part, tuple | list)
        else isinstance(part, bool | int | float | np.number | np.bool_)
        for part in value
    )


def describe_value(value: object) -> str:
    """Describe the form of an item, without its content."""
    if isinstance(value, Mapping):
        keys = list(map(str, value))
        more = f" and {len(keys) - _MAX_KEYS} more" if len(keys) > _MAX_KEYS else ""
        return f"dicts with keys {', '.join(keys[:_MAX_KEYS])}{more}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}s of {len(value)}"
    if isinstance(value, torch.Tensor | np.ndarray):
        return "single arrays"
    return f"of type {type(value).__name__}"


def describe_batch(batch: object) -> str:
    """Describe types and shapes, with k for the number of examples."""
    if isinstance(batch, torch.Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {describe_shape(batch)}"
    if isinstance(batch, dict):
        parts = [f"{name}: {describe_batch(part)}" for name, part in batch.items()]
        return f"{{{', '.join(parts)}}}"
    if isinstance(batch, tuple | list):
        return f"[{', '.join(map(describe_batch, batch))}]"
    return type(batch).__name__


def describe_shape(tensor: torch.Tensor) -> str:
    """Describe a shape, with k for the number of examples."""
    return f"({', '.join(['k', *map(str, tensor.shape[1:])])})"
