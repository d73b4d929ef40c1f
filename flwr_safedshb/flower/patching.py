"""How Flower is monkeypatched: what the patches were tried with, and a loud fallback.

Every monkeypatch is a `Patch`. It is applied only if the installed minor version is in
`TRIED` and the code that it replaces looks as expected. Otherwise Flower runs
unchanged, and one warning names the versions and what is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from logging import WARNING
from types import CodeType
from typing import Any

from flwr.common import log

# The minor versions of flwr that all patches were tried with.
TRIED = ("1.41", "1.42")
VERSION = metadata.version("flwr")
REMEDY = "install flwr>=1.41,<2 as in constraints.txt"

# A claim about Flower's code, and whether it holds.
Expectation = tuple[str, bool]

_warned: set[str] = set()


@dataclass(frozen=True)
class Patch:
    """A monkeypatch of Flower.

    Attributes
    ----------
    target : str
        What is replaced.
    lost : str
        What users lose where it is not applied.
    upstream : str
        What Flower would have to offer to make it unnecessary.
    expectations : callable
        Yields what the patch expects of Flower's code.
    """

    target: str
    lost: str
    upstream: str
    expectations: Callable[[], Iterable[Expectation]]

    def fits(self) -> bool:
        """Return True if the patch may be applied; if not, warn once and say why."""
        if is_tried(VERSION):
            reasons = find_unmet(self.expectations)
        else:
            reasons = ["this minor version was never tried"]
        if reasons and self.target not in _warned:
            _warned.add(self.target)
            log(
                WARNING,
                "flwr %s: the patch of %s is not applied (%s). Lost: %s. "
                "Tried versions: %s; install one of them to get it back.",
                *(VERSION, self.target, "; ".join(reasons), self.lost),
                ", ".join(f"{tried}.*" for tried in TRIED),
            )
        return not reasons


def is_tried(version: str) -> bool:
    """Return True if the patches were tried with the minor version of a flwr."""
    return ".".join(version.split(".")[:2]) in TRIED


def find_unmet(expectations: Callable[[], Iterable[Expectation]]) -> list[str]:
    """Return the expectations that do not hold; an exception is one of them."""
    unmet = []
    try:
        for claim, holds in expectations():
            if not holds:
                unmet.append(claim)
    except Exception as error:
        unmet.append(f"{type(error).__name__}: {error}")
    return unmet


def takes_arguments(function: Callable[..., Any], *names: str) -> bool:
    """Return True if a function's positional arguments have exactly these names."""
    code: CodeType = function.__code__
    return code.co_varnames[: code.co_argcount] == names


def uses_names(function: Callable[..., Any], *names: str) -> bool:
    """Return True if a function's bytecode refers to all these names."""
    code: CodeType = function.__code__
    return {*names} <= {*code.co_names}
