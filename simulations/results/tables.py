"""Tables, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

# Longer tables are folded in reports, and files that pages link.
MAX_ROWS = 24


@dataclass(frozen=True)
class Table:
    """Heads and rows of cells."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def is_short(self) -> bool:
        """Whether it is read at a glance."""
        return len(self.rows) <= MAX_ROWS

    @property
    def markdown(self) -> str:
        """The table in Markdown."""
        return "\n".join(format_markdown(self.heads, self.rows))

    @property
    def csv(self) -> str:
        """The table as CSV, without the marks of Markdown."""
        text = io.StringIO()
        plain = [[cell.replace("**", "") for cell in row] for row in self.rows]
        csv.writer(text, lineterminator="\n").writerows([self.heads, *plain])
        return text.getvalue()


def format_markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def slugify(words: str) -> str:
    """Return words as a file's name."""
    return re.sub(r"[^\w.]+", "-", words.replace(" = ", "")).strip("-")
