"""Put generated tables and figures into a page of the documentation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from simulations.config import SettingsError, explain_errors
from simulations.results.tables import slugify

if TYPE_CHECKING:
    from simulations.study import Section


def publish_sections(
    page: Path, name: str, sections: Sequence[Section], figures: Path
) -> None:
    """Put a study's report between the two marks of a page.

    Parameters
    ----------
    page : Path
        Holds the lines ``<!-- begin NAME -->`` and ``<!-- end NAME -->``, each once.
    name : str
    sections : sequence of Section
        A long table becomes a file in ``data/`` beside the page, which links it.
    figures : Path
        The folder of the drawn figures, copied into ``images/`` beside the page.
    """
    shown = []
    for section in sections:
        stem = slugify(section.title)
        shown += [f"### {section.title}", section.text]
        drawn = {caption: slugify(caption) for caption in section.figures}
        for quantity in {q for some in section.panels.values() for q in some}:
            caption = f"{section.title}: {quantity.replace('_', ' ')}"
            drawn[caption] = f"{stem}_{quantity}"
        for caption, source in sorted(drawn.items()):
            shown.append(copy_picture(figures / f"{source}.png", page, name, caption))
        if section.table is not None and section.table.is_short:
            shown.append(section.table.markdown)
        elif section.table is not None:
            file = page.parent / "data" / f"{name}-{stem}.csv"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(section.table.csv)
            rows = len(section.table.rows)
            shown.append(f"[The table, {rows} rows, as CSV](data/{file.name}).")
        shown.append(section.notes)
    publish(page, name, "\n\n".join(filter(None, map(str.strip, shown))))


def copy_picture(source: Path, page: Path, name: str, caption: str) -> str:
    """Copy a figure into ``images/`` beside a page, and return its Markdown."""
    target = page.parent / "images" / f"{name}_{source.name}"
    target.parent.mkdir(parents=True, exist_ok=True)
    # With a palette, which is plenty for lines: pages on phones stay light.
    with Image.open(source) as picture:
        picture.convert("RGB").quantize(64).save(target, optimize=True)
    return f"![{caption}](images/{target.name})"


def publish(
    page: Path, name: str, text: str, figures: Mapping[str, Path] | None = None
) -> None:
    """Replace what stands between two marks of a page by Markdown and figures."""
    begin, end = check_page(page, name)
    shown = [
        copy_picture(source, page, name, caption)
        for caption, source in (figures or {}).items()
    ]
    between = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", flags=re.DOTALL)
    new = "\n\n".join([begin, text.strip(), *shown, end])
    page.write_text(between.sub(lambda _: new, page.read_text()))


def check_page(page: Path, name: str) -> tuple[str, str]:
    """Return the two marks, which a page must hold."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    with explain_errors():
        text = page.read_text()
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SettingsError(f"{page} must hold {begin} and {end} once each; add them")
    return begin, end
