"""Batches: a tensor with examples on the first axis, or a nest of such tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, cast

import torch

Batch: TypeAlias = "torch.Tensor | Sequence[Batch] | Mapping[str, Batch]"
# Shape of an example, without the first axis, and type of every tensor of a batch.
Spec: TypeAlias = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def mapped(function: Callable[[torch.Tensor], torch.Tensor], batch: Batch) -> Batch:
    """Return the batch with a function of every tensor in its place."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {name: mapped(function, part) for name, part in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(mapped(function, part) for part in batch)
    return cast(Batch, batch)  # what a model returns beside tensors


def leaves(batch: Batch) -> list[torch.Tensor]:
    """Return the tensors of a batch."""
    found: list[torch.Tensor] = []

    def see(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    mapped(see, batch)
    return found


def spec(inputs: Batch, targets: Batch) -> Spec:
    """Return shapes and types, which say nothing about values."""
    tensors = (*leaves(inputs), *leaves(targets))
    return tuple((tuple(t.shape[1:]), t.dtype) for t in tensors)


def rows(batch: Batch, which: torch.Tensor | slice) -> Batch:
    """Return some examples of a batch."""
    return mapped(lambda tensor: tensor[which], batch)


def joined(batches: Sequence[Batch]) -> Batch:
    """Return one batch of all examples."""
    columns = zip(*map(leaves, batches), strict=True)
    tensors = iter([torch.cat(column) for column in columns])
    return mapped(lambda _: next(tensors), batches[0])
