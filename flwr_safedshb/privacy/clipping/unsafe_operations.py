"""What a model and a loss keep outside themselves, where a copy does not reach.

Closures, global variables and class attributes are shared by all copies. A value that
one example leaves there reaches the next example, so none of them may change.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from flwr_safedshb.privacy.clipping.fingerprint import Fingerprint, describe

# Libraries whose functions are not looked into.
_LIBRARIES = {"torch", "numpy", "builtins", "functools", "math", "transformers", "peft"}
_CONSTANT = (str, bytes, bool, complex, type(None), type)


def describe_outside(module: nn.Module, loss: object) -> dict[str, Fingerprint | None]:
    """Return what the functions of a model and a loss can reach, by where it is."""
    functions: list[Any] = [loss, getattr(loss, "__call__", None)]  # noqa: B004
    found: dict[str, object] = {}
    for layer in module.modules():
        for kind in type(layer).__mro__:
            if _is_own(kind.__module__):
                functions += [v for v in vars(kind).values() if callable(v)]
                found |= {
                    f"the class attribute {kind.__name__}.{name}": value
                    for name, value in vars(kind).items()
                    if not callable(value) and not name.startswith("__")
                }
        functions += [value for value in vars(layer).values() if callable(value)]
    found |= dict(_reach(functions))
    return {name: describe(value) for name, value in found.items()}


def _is_own(module_name: str) -> bool:
    return module_name.partition(".")[0] not in _LIBRARIES


def _reach(functions: list[Any]) -> Iterator[tuple[str, object]]:
    """Yield the variables that functions use, and those of functions they use."""
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
        if not _is_own(function.__module__ or ""):
            continue
        free = function.__code__.co_freevars
        named = zip(free, function.__closure__ or (), strict=True)
        variables = {
            f"the closure variable {name}": cell.cell_contents
            for name, cell in named
            if _is_filled(cell)
        }
        variables |= {
            f"the global variable {name}": function.__globals__[name]
            for name in _names(function.__code__)
            if name in function.__globals__
        }
        for name, value in variables.items():
            if callable(value):
                functions.append(value)
            elif not isinstance(value, _CONSTANT):
                yield name, value


def _names(code: CodeType) -> set[str]:
    """Return the names that a function uses, and the functions within it."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names}.union(*map(_names, inner))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # nothing has been put into it yet
        return False
