"""Pieces of a page of HTML that loads nothing and reads on a phone."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape

from matplotlib.figure import Figure

from simulations.results import plots

STYLE = """
:root { color-scheme: light; --ink: #1b1f24; --soft: #57606a; --line: #d8dee4; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 1rem; color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; background: #fff; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p { max-width: 45rem; margin: .5rem 0; }
.cards { display: grid; gap: .6rem;
  grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); }
.card { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .7rem; }
.card b { display: block; font-size: 1.25rem; overflow-wrap: anywhere; }
.card span { color: var(--soft); font-size: .85rem; }
.pictures { display: grid; gap: .8rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
img { width: 100%; height: auto; display: block; }
figure { margin: 0; max-width: 45rem; }
figcaption { color: var(--soft); font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; vertical-align: top;
  border-bottom: 1px solid var(--line); }
.warning { border-left: .3rem solid #d55e00; padding: .3rem .8rem;
  background: #fff4ec; }
.notes { white-space: pre-wrap; }
pre { overflow-x: auto; background: #f6f8fa; padding: .8rem; font-size: .8rem; }
summary { cursor: pointer; padding: .3rem 0; }
"""


def picture(figure: Figure, caption: str) -> str:
    """Return a figure as an image inside the page."""
    # As an image of its own, so that the names inside several do not clash.
    data = base64.b64encode(plots.svg(figure).encode()).decode()
    words = escape(caption or figure.axes[0].get_title())
    image = f'<img alt="{words}" src="data:image/svg+xml;base64,{data}">'
    text = f"<figcaption>{words}</figcaption>" if caption else ""
    return f"<figure>{image}{text}</figure>"


def pictures(figures: Sequence[str]) -> str:
    """Return figures side by side where there is room."""
    return f'<div class="pictures">{"".join(figures)}</div>'


def cards(facts: Mapping[str, str]) -> str:
    """Return facts, by their names, as cards."""
    cards = (
        f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in facts.items()
    )
    return f'<div class="cards">{"".join(cards)}</div>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table, without a head if all of it is empty."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads) if any(heads) else ""
    lines = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{lines}</table></div>'


def details(name: str, content: str) -> str:
    """Return content that opens when its name is touched."""
    return f"<details><summary>{escape(name)}</summary>{content}</details>"


def whole(title: str, body: Sequence[str]) -> str:
    """Return the whole page."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )
