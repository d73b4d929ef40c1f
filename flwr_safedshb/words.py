r"""Words of others: names that may be kept, and texts that are safe to show.

A server names its runs, and a node keeps these names for years, shows them in a
terminal and exports them to spreadsheets. A terminal obeys some characters, and a
spreadsheet takes some texts for formulas.

>>> is_plain("run-2.b"), is_plain("=1+1"), is_plain("a b")
(True, False, False)
>>> print(shown("red \x1b[31m"))
red \x1b[31m
>>> cell("=1+1")
"'=1+1"
"""

from __future__ import annotations

import re

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
# By what a spreadsheet tells a formula.
_FORMULA = ("=", "+", "-", "@")


def is_plain(name: str) -> bool:
    """Say whether a name is up to 64 letters, digits, dots, dashes and underscores."""
    return _PLAIN.fullmatch(name) is not None


def shown(text: str) -> str:
    """Return a text on one line, with escapes for what a terminal would obey."""
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def shown_lines(text: str) -> str:
    """Return a text with its lines, and escapes for all else a terminal would obey."""
    return "\n".join(map(shown, text.split("\n")))


def cell(text: str) -> str:
    """Return a text for a cell of a table that no spreadsheet takes for a formula."""
    safe = shown(text)
    return f"'{safe}" if safe.lstrip().startswith(_FORMULA) else safe


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
