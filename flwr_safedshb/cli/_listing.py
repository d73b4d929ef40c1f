"""Find classes to list, and print tables."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Sequence
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")


def find_classes(package: ModuleType, base: type[T]) -> list[type[T]]:
    """Return the concrete subclasses of `base` in a package's modules, by name.

    Nothing is registered: a new file is enough.
    """
    kinds: set[type[T]] = set()
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(found.name)
        for _, kind in inspect.getmembers(module, inspect.isclass):
            own = kind.__module__ == module.__name__ and kind.__name__[0] != "_"
            if issubclass(kind, base) and own:
                kinds.add(kind)
    return sorted(
        (kind for kind in kinds if not inspect.isabstract(kind)),
        key=lambda kind: kind.__name__,
    )


def print_table(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], number: str = ""
) -> None:
    """Print a table; the column with the head `number` is right-aligned."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from flwr_safedshb.sanitize import escape_lines

    table = Table(
        title=Text(escape_lines(title)), title_justify="left", box=box.SIMPLE_HEAD
    )
    for i, head in enumerate(heads):
        table.add_column(
            head,
            style="bold" if i == 0 else None,
            no_wrap=i == 0,
            justify="right" if head == number else "left",
        )
    for row in rows:
        # As text: what stands in brackets is no markup.
        table.add_row(*(Text(escape_lines(cell)) for cell in row))
    Console().print(table)
