"""Recognise a model and a loss that were checked before, made anew.

Apps make their model in ``client_fn``, and so with every message. What a check finds
out depends on how a model is built and not on the values of its parameters and buffers.
"""

from __future__ import annotations

from collections.abc import Collection
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

_KNOWN_LIBRARIES = ("builtins", "collections", "functools", "numpy", "torch")
# Values of larger tensors, that are neither parameters nor buffers, are not compared.
_MAX_VALUES = 2**16
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
# Classes and functions count by their identity.
_BY_IDENTITY = (type, FunctionType, BuiltinFunctionType)
Fingerprint = tuple[Any, ...]


def make_fingerprint(model: nn.Module, loss: object) -> Fingerprint | None:
    """Return what models and losses that are built alike have in common.

    Returns
    -------
    tuple, or None
        Equal for all that are built alike; None if something in them cannot be
        compared.
    """
    variables = {id(t) for t in (*model.parameters(), *model.buffers())}
    return describe((model, loss), variables)


def describe(thing: object, variables: Collection[int] = ()) -> Fingerprint | None:
    """Return equal tuples for things that are built alike; None where none can be had.

    Parameters
    ----------
    thing : object
    variables : collection of int
        Identities of tensors whose values do not matter.
    """
    try:
        return _Description(variables).describe(thing)
    except Exception:  # of an object that cannot be taken apart, any kind
        return None


class _Description:
    """Describe objects by their parts, as a copy would be made of them."""

    def __init__(self, variables: Collection[int]) -> None:
        self._variables = variables
        self._tensors: dict[int, int] = {}
        self._within: set[int] = set()

    def describe(self, thing: Any) -> Fingerprint:
        """Return equal tuples for things that are built alike."""
        if isinstance(thing, _PLAIN):
            return type(thing), repr(thing)
        if isinstance(thing, _BY_IDENTITY):
            return (thing,)
        if isinstance(thing, torch.Tensor):
            return self._describe_tensor(thing)
        if id(thing) in self._within or _says_itself(type(thing)):
            raise ValueError(
                "an object is a part of itself, or says what it is made of"
            )
        self._within.add(id(thing))
        parts = tuple(map(self.describe, _take_apart(thing)))
        self._within.remove(id(thing))
        return type(thing), *parts

    def _describe_tensor(self, tensor: torch.Tensor) -> Fingerprint:
        # One tensor in two places is something else than two equal ones.
        number = self._tensors.setdefault(id(tensor), len(self._tensors))
        kind = tensor.dtype, tensor.device, tensor.shape, tensor.requires_grad
        if id(tensor) in self._variables:
            return type(tensor), number, *kind
        if tensor.numel() > _MAX_VALUES:
            raise ValueError("a tensor that is no buffer is too large to compare")
        return type(tensor), number, *kind, tensor.detach().cpu().numpy().tobytes()


def _says_itself(kind: type) -> bool:
    """Return whether a class decides itself what a copy is made of."""
    own = ("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__")
    strangers = [
        each
        for each in kind.__mro__
        if each.__module__.partition(".")[0] not in _KNOWN_LIBRARIES
    ]
    return any(name in vars(each) for each in strangers for name in own)


def _take_apart(thing: Any) -> tuple[Any, ...]:
    if type(thing) in (tuple, list):
        return tuple(thing)
    if type(thing) is dict:
        return tuple(part for item in thing.items() for part in item)
    if type(thing) in (set, frozenset):
        return tuple(sorted(thing, key=repr))
    made: tuple[Any, ...] = thing.__reduce_ex__(4)
    # The last two are iterators over the items of lists and dicts.
    items = [tuple(part) if part is not None else None for part in made[3:5]]
    return *made[:3], *items
