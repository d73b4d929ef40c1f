"""Recognise a model and a loss that were checked before, made anew.

Apps make their model in ``client_fn``, and so with every message. What a check finds
out depends on how a model is built and not on the values of its parameters and buffers.
"""

from __future__ import annotations

import io
import pickle
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

# Values of larger tensors, that are neither parameters nor buffers, are not compared.
_MAX_VALUES = 2**16


class Fingerprint:
    """What two models and losses have in common that are built alike.

    Attributes
    ----------
    content : bytes
        Equal for models that are built alike.
    """

    def __init__(self, content: bytes, kept: list[object]) -> None:
        self.content = content
        # Classes and functions count by their identity, so they must not go away.
        self._kept = kept

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fingerprint) and other.content == self.content

    def __hash__(self) -> int:
        return hash(self.content)


def make_fingerprint(model: nn.Module, loss: object) -> Fingerprint | None:
    """Return the fingerprint of a model and its loss; None where none can be had."""
    content = io.BytesIO()
    pickler = _Pickler(content, model)
    try:
        pickler.dump((model, loss))
    except Exception:  # an attribute that cannot be pickled, of any kind
        return None
    return Fingerprint(content.getvalue(), pickler.kept)


class _Pickler(pickle.Pickler):
    """Write how objects are built, without the values of parameters and buffers."""

    def __init__(self, file: io.BytesIO, model: nn.Module) -> None:
        super().__init__(file)
        # Without a memo: whether equal strings are one object must not matter.
        self.fast = True
        self.kept: list[object] = []
        self._variables = {id(t) for t in (*model.parameters(), *model.buffers())}
        self._tensors: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> object:
        """Return what stands for tensors, classes and functions."""
        if isinstance(obj, torch.Tensor):
            return self._describe(obj)
        if isinstance(obj, MethodType):
            return None
        if isinstance(obj, type | FunctionType | BuiltinFunctionType):
            self.kept.append(obj)
            return "named", id(obj)
        return None

    def _describe(self, tensor: torch.Tensor) -> tuple[object, ...]:
        # The same tensor in two places is not the same as two equal ones.
        number = self._tensors.setdefault(id(tensor), len(self._tensors))
        kind = str(tensor.dtype), str(tensor.device), tuple(tensor.shape)
        if id(tensor) in self._variables:
            return number, *kind, tensor.requires_grad
        if tensor.numel() > _MAX_VALUES:
            raise ValueError("a tensor that is no buffer is too large to compare")
        return number, *kind, tensor.detach().cpu().numpy().tobytes()
