"""Data as people have them, as pairs of an input and a target.

Items may be pairs or dicts (Hugging Face, flwr-datasets), their parts tensors, numbers,
numpy arrays, lists of numbers, or nests of these. Whole sets may be pairs of arrays.
What cannot be told from the first items is said in words, on the node: what the items
are, and what to write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.weak import WeakTensorKeyDictionary

from flwr_safedshb.privacy.examples import Batch, Data, log_unusable, tensors_of

# From an item to its input and its target.
Unpack = Callable[[Any], tuple[Any, Any]]

# Items that decide what all look like, and how many are read to find them.
_DECIDE, _LOOK = 3, 16
_TOLD = 8
# Characters of another error's text.
_LONG = 100
_looked_at = WeakTensorKeyDictionary()
_UNREAL = "values that are not finite; fill them in, or leave these examples out"


class DatasetError(ValueError):
    """Input and target of the examples cannot be told; says what they are instead."""


def examples_of(
    dataset: object, target: str | None = None, unpack: Unpack | None = None
) -> tuple[Data, int]:
    """Return a dataset whose items are pairs of nests of tensors, and its size.

    Parameters
    ----------
    dataset : Dataset, sequence, or pair of arrays
    target : str, optional
        Of items that are dicts, the key of the target. The rest is the input: the value
        itself if it is one, else a dict, which the model gets as keywords.
    unpack : callable, optional
        From an item of any other kind to its input and its target.

    Raises
    ------
    DatasetError
        If the first items are something else; says what they are, and the remedy.
    """
    if target is not None and unpack is not None:
        raise DatasetError("give target or unpack, not both: unpack returns the target")
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2 and not unpack:
        dataset = dataset.tensors
    if _is_pair(dataset):
        if target is not None or unpack is not None:
            raise DatasetError("a pair (inputs, targets) takes no target and no unpack")
        return _whole(cast(Sequence[object], dataset))
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
    examples = Examples(cast(Dataset[object], dataset), target, unpack)
    return examples, len(examples)


class Examples(Dataset[tuple[Batch, Batch]]):
    """Items of any kind as pairs of an input and a target; see `examples_of`."""

    def __init__(
        self, dataset: Dataset[object], target: str | None, unpack: Unpack | None
    ) -> None:
        self.dataset, self._target, self._unpack = dataset, target, unpack
        self._form: str | None = None
        self._unread: Exception | None = None
        self._form = self._common_form()

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def __getitem__(self, index: int) -> tuple[Batch, Batch]:
        """Return an example; raises if it is built otherwise than the first ones.

        What has values like NaN is none either: it could only count as zero, unsaid.
        """
        inputs, target = self._split(self.dataset[index])
        pair = _nest(inputs, "input"), _nest(target, "target")
        if self._form is not None and _form(pair) != self._form:
            raise DatasetError(
                f"the item is {_form(pair)}, and others {self._form}; give all items "
                "the same parts, types and shapes, as by padding"
            )
        if not all(tensor.isfinite().all() for tensor in tensors_of(*pair)):
            raise ValueError(_UNREAL)
        return pair

    def _split(self, item: object) -> tuple[object, object]:
        if self._unpack is not None:
            try:
                pair = self._unpack(item)
            except Exception as error:
                cause = f"{type(error).__name__}: {str(error)[:_LONG]}"
                raise DatasetError(
                    f"unpack fails: {cause}; items are {_kind(item)}"
                ) from error
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise DatasetError(
                    f"unpack returns {_kind(pair)}; return (input, target)"
                )
            return pair[0], pair[1]
        if isinstance(item, Mapping):
            if self._target not in item:
                named = "" if self._target is None else f", and none is {self._target}"
                raise DatasetError(
                    f"items are {_kind(item)}{named}; name the target, as in "
                    f"target={list(item)[-1]!r}, or give unpack="
                )
            rest = {key: item[key] for key in item if key != self._target}
            if not rest:
                raise DatasetError(
                    f"items are {_kind(item)}, and nothing is left beside the target"
                )
            inputs = next(iter(rest.values())) if len(rest) == 1 else rest
            return inputs, item[self._target]
        if self._target is not None:
            raise DatasetError(
                f"items are {_kind(item)}, and target={self._target!r} is for dicts; "
                "leave it out, or give unpack="
            )
        if isinstance(item, tuple | list) and len(item) == 2:
            return item[0], item[1]
        raise DatasetError(
            f"items are {_kind(item)}, and not pairs (input, target); say which is "
            "which, as in unpack=lambda item: (item[0], item[1])"
        )

    def _common_form(self) -> str | None:
        """Return how most of the first items are built, or say what is wrong."""
        found: Counter[str] = Counter()
        wrong: dict[str, Exception] = {}
        unread: Exception | None = None
        looked = range(min(len(self), _LOOK))
        for index in looked:
            try:
                found[_form(self[index])] += 1
            except DatasetError as error:
                wrong.setdefault(str(error), error)
                found[str(error)] += 1
            except Exception as error:  # of the dataset's own
                unread = error
            if found.total() == _DECIDE:
                break
        if not found:
            self._unread = unread
            return None
        form, _ = found.most_common(1)[0]
        if form in wrong:
            raise wrong[form]
        return form

    def refuse_unread(self, shown: bool) -> None:
        """Say that none of the first items can be read, and why where that is `shown`.

        Elsewhere there is an answer all the same: that there is none would say
        something.
        """
        if self._unread is None:
            return
        if not shown:
            log_unusable(min(len(self), _LOOK), self._unread)
            return
        text = f"{type(self._unread).__name__}: {str(self._unread)[:_LONG]}"
        raise DatasetError(
            f"none of the first items can be read: {text}"
        ) from self._unread


def _log_unreal(tensors: Sequence[torch.Tensor]) -> None:
    """Write to the node's log how many rows of whole arrays have values like NaN.

    Once: apps hand in the same arrays with every message, and to look takes time.
    """
    if all(tensor in _looked_at for tensor in tensors):
        return
    _looked_at.update((tensor, True) for tensor in tensors)
    if all(tensor.sum().isfinite() for tensor in tensors):
        return
    real = [tensor.isfinite().reshape(len(tensor), -1).all(1) for tensor in tensors]
    if count := int((~torch.stack(real).all(0)).sum()):
        log_unusable(count, ValueError(_UNREAL))


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


def _whole(pair: Sequence[object]) -> tuple[Data, int]:
    inputs, targets = _nest(pair[0], "inputs"), _nest(pair[1], "targets")
    tensors = tensors_of(inputs, targets)
    sizes = {len(tensor) if tensor.dim() else 0 for tensor in tensors}
    if len(sizes) != 1:
        raise DatasetError(
            "inputs and targets must have an example in every row, and as many rows; "
            f"they have {', '.join(map(str, sorted(sizes)))}"
        )
    _log_unreal(tensors)
    return (inputs, targets), sizes.pop()


def _nest(value: object, name: str) -> Batch:
    """Return a value as a tensor or a nest of tensors.

    What is no tensor yet becomes one of the type that models and losses take: torch's
    usual floats, and int64.
    """
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Mapping):
        return {
            str(key): _nest(value[key], f"{name}[{key!r}]") for key in sorted(value)
        }
    if hasattr(value, "to_numpy"):  # a frame or a column of pandas
        value = value.to_numpy()
    if isinstance(value, tuple | list) and not _of_numbers(value):
        return [_nest(part, f"{name}[{i}]") for i, part in enumerate(value)]
    array = np.asarray(value) if _is_plain(value) else None
    if array is None or array.dtype.kind not in "biuf":
        raise DatasetError(
            f"the {name} is {_kind(value)}, and no tensor, array or number; make it "
            "one in the dataset, or leave it out by unpack="
        )
    if array.dtype.kind == "f":
        return torch.from_numpy(np.array(array)).to(torch.get_default_dtype())
    wide = array.dtype.kind in "iu" and array.dtype != np.uint8
    return torch.from_numpy(np.array(array, np.int64 if wide else None))


def _is_plain(value: object) -> bool:
    return isinstance(
        value, bool | int | float | np.generic | np.ndarray | tuple | list
    )


def _of_numbers(value: Sequence[object]) -> bool:
    """Say whether a list has numbers, or lists of them, and nothing else."""
    return bool(value) and all(
        _of_numbers(part)
        if isinstance(part, tuple | list)
        else isinstance(part, bool | int | float | np.number | np.bool_)
        for part in value
    )


def _form(value: object) -> str:
    """Return how a nest is built, and of tensors of which type and shape."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_form(v)}' for key, v in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_form, value))})"
    assert isinstance(value, torch.Tensor)
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _kind(value: object) -> str:
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
