"""Pieces of a page of HTML that loads nothing and reads on a phone.

``page.html.j2`` has their markup; every text that is put into it is escaped.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape

from jinja2 import Environment, PackageLoader
from markdown_it import MarkdownIt
from matplotlib.figure import Figure

from simulations.results import plots

_MACROS = (
    Environment(loader=PackageLoader(__package__, "."), autoescape=True)
    .get_template("page.html.j2")
    .module
)


# Escapes HTML.
_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")


def heading(level: int, words: str) -> str:
    """Return a heading."""
    return f"<h{level}>{escape(words)}</h{level}>"


def markdown(text: str) -> str:
    """Return Markdown as HTML."""
    return str(_MARKDOWN.render(text))


def picture(figure: Figure, caption: str) -> str:
    """Return a figure as an image inside the page."""
    # As an image of its own, so that the names inside several do not clash.
    data = base64.b64encode(plots.svg(figure).encode()).decode()
    return _made("picture", data, caption, caption or figure.axes[0].get_title())


def pictures(figures: Sequence[str]) -> str:
    """Return figures side by side where there is room."""
    if not figures:
        return ""
    return f'<div class="pictures">{"".join(figures)}</div>'


def cards(facts: Mapping[str, str]) -> str:
    """Return facts, by their names, as cards."""
    return _made("cards", facts)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose cells may have Markdown; on a phone each row is a block."""
    cells = [[_MARKDOWN.renderInline(cell) for cell in row] for row in rows]
    return _made("table", heads, cells)


def details(name: str, content: str) -> str:
    """Return content that opens when its name is touched."""
    return _made("details", name, content)


def whole(title: str, body: Sequence[str]) -> str:
    """Return the whole page."""
    return _made("whole", title, body)


def _made(macro: str, *values: object) -> str:
    return str(getattr(_MACROS, macro)(*values))
