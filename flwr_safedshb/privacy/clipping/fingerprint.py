"""Compare what models and losses are made of, and what they share with their copies.

Apps build their model in ``client_fn``, and so anew with every message. What a check
finds out depends on how a model is built and not on the values of its parameters and
buffers, so a model with the fingerprint of an earlier one is not checked again.

Closures, global variables and class attributes are shared by all copies of a model: a
value that one example leaves there reaches the next example, so none may change.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

Fingerprint = tuple[Any, ...]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
# Classes and functions are equal if they are the same object.
_BY_IDENTITY = (type, FunctionType, BuiltinFunctionType)
# Libraries whose classes do not say in odd ways what a copy of them is.
_COPY_LIBRARIES = ("builtins", "collections", "functools", "numpy", "torch")
# Libraries whose functions are not searched for state.
_STATELESS_LIBRARIES = (
    *("torch", "numpy", "builtins", "functools", "math", "transformers", "peft"),
)
# A variable of these types never changes itself.
_IMMUTABLE = (str, bytes, bool, complex, type(None), type)
# Larger tensors, other than parameters and buffers, are not compared.
_MAX_VALUES = 2**16


def make_fingerprint(model: nn.Module, loss: object) -> Fingerprint | None:
    """Return a tuple that is equal for models and losses that are built alike.

    The values of parameters and buffers do not matter. None if something cannot be
    compared.
    """
    variables = {id(t) for t in (*model.parameters(), *model.buffers())}
    return _describe((model, loss), variables)


def fingerprint_shared_state(
    module: nn.Module, loss: object
) -> dict[str, Fingerprint | None]:
    """Return fingerprints of what all copies of a model and a loss share, by name."""
    functions: list[Any] = [loss, getattr(loss, "__call__", None)]  # noqa: B004
    found: dict[str, object] = {}
    for layer in module.modules():
        for kind in type(layer).__mro__:
            if _may_hold_state(kind.__module__):
                functions += [v for v in vars(kind).values() if callable(v)]
                found |= {
                    f"the class attribute {kind.__name__}.{name}": value
                    for name, value in vars(kind).items()
                    if not callable(value) and not name.startswith("__")
                }
        functions += [value for value in vars(layer).values() if callable(value)]
    found |= dict(_find_variables(functions))
    return {name: _describe(value) for name, value in found.items()}


def _describe(value: object, variables: Collection[int] = ()) -> Fingerprint | None:
    try:
        return _Describer(variables).describe(value)
    except Exception:  # an object that cannot be taken apart may raise anything
        return None


class _Describer:
    """Describe objects by their parts, as a deep copy takes them apart.

    Parameters
    ----------
    variables : collection of int
        Identities of tensors whose values do not matter.
    """

    def __init__(self, variables: Collection[int]) -> None:
        self._variables = variables
        self._tensors: dict[int, int] = {}
        self._parents: set[int] = set()

    def describe(self, value: Any) -> Fingerprint:
        """Return tuples that are equal for objects that are built alike."""
        if isinstance(value, _PLAIN):
            return type(value), repr(value)
        if isinstance(value, _BY_IDENTITY):
            return (value,)
        if isinstance(value, torch.Tensor):
            return self._describe_tensor(value)
        if id(value) in self._parents or _customizes_copy(type(value)):
            raise ValueError("an object is a part of itself, or customizes its copy")
        self._parents.add(id(value))
        parts = tuple(map(self.describe, _take_apart(value)))
        self._parents.remove(id(value))
        return type(value), *parts

    def _describe_tensor(self, tensor: torch.Tensor) -> Fingerprint:
        # One tensor in two places is something else than two equal ones.
        number = self._tensors.setdefault(id(tensor), len(self._tensors))
        kind = tensor.dtype, tensor.device, tensor.shape, tensor.requires_grad
        if id(tensor) in self._variables:
            return type(tensor), number, *kind
        if tensor.numel() > _MAX_VALUES:
            raise ValueError("a tensor that is no buffer is too large to compare")
        return type(tensor), number, *kind, tensor.detach().cpu().numpy().tobytes()


def _customizes_copy(kind: type) -> bool:
    """Return whether a class defines itself what a copy is made of."""
    hooks = ("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__")
    return any(
        name in vars(each)
        for each in kind.__mro__
        if each.__module__.partition(".")[0] not in _COPY_LIBRARIES
        for name in hooks
    )


def _take_apart(value: Any) -> tuple[Any, ...]:
    if type(value) in (tuple, list):
        return tuple(value)
    if type(value) is dict:
        return tuple(part for item in value.items() for part in item)
    if type(value) in (set, frozenset):
        return tuple(sorted(value, key=repr))
    reduced: tuple[Any, ...] = value.__reduce_ex__(4)
    # The last two are iterators over the items of lists and dicts.
    items = [tuple(part) if part is not None else None for part in reduced[3:5]]
    return *reduced[:3], *items


def _may_hold_state(module_name: str) -> bool:
    return module_name.partition(".")[0] not in _STATELESS_LIBRARIES


def _find_variables(functions: list[Any]) -> Iterator[tuple[str, object]]:
    """Yield the outer variables of functions, and of the functions that they use."""
    seen: set[int] = set()
    while functions:
        function = functions.pop()
        if isinstance(function, functools.partial):
            functions.append(function.func)
        if isinstance(function, MethodType):
            function = function.__func__
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        if not _may_hold_state(function.__module__ or ""):
            continue
        cells = zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        )
        variables = {
            f"the closure variable {name}": cell.cell_contents
            for name, cell in cells
            if _is_filled(cell)
        }
        variables |= {
            f"the global variable {name}": function.__globals__[name]
            for name in _list_names(function.__code__)
            if name in function.__globals__
        }
        for name, value in variables.items():
            if callable(value):
                functions.append(value)
            elif not isinstance(value, _IMMUTABLE):
                yield name, value


def _list_names(code: CodeType) -> set[str]:
    """Return the names that a function uses, with those of functions within it."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names}.union(*map(_list_names, inner))


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # nothing has been put into it yet
        return False
