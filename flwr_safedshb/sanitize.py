r"""Text from others: which names may be kept, and how text is made safe to show.

A server names its runs, and a node keeps these names for years, shows them in a
terminal and exports them to spreadsheets. A terminal obeys control characters, and a
spreadsheet takes some texts for formulas.

>>> [bool(SAFE_NAME.fullmatch(name)) for name in ("run-2.b", "=1+1", "a b")]
[True, False, False]
>>> print(escape("red \x1b[31m"))
red \x1b[31m
>>> escape_cell("=1+1")
"'=1+1"
"""

from __future__ import annotations

import re

# A name of up to 64 letters, digits, dots, dashes and underscores.
SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
# What makes a text a formula, in ASCII and full width; and what may end a cell.
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
_ENDS = ";|"


def escape(text: str) -> str:
    """Return a text on one line, with control characters escaped."""
    return "".join(c if c.isprintable() else _escape_character(c) for c in text)


def escape_lines(text: str) -> str:
    """Return a text with its line breaks kept and other control characters escaped."""
    return "\n".join(map(escape, text.split("\n")))


def escape_cell(text: str) -> str:
    """Return a text for a table cell that no spreadsheet takes for a formula."""
    safe = "".join(f"\\x{ord(c):02x}" if c in _ENDS else c for c in escape(text))
    return f"'{safe}" if safe.lstrip(" '\"").startswith(_FORMULA) else safe


def _escape_character(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
