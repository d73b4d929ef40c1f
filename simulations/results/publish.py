"""Put generated tables and figures into a page of the documentation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from simulations.config import SettingsError, explained


def publish(
    page: Path, name: str, text: str, figures: Mapping[str, Path] | None = None
) -> None:
    """Replace what stands between two marks of a page.

    Parameters
    ----------
    page : Path
        Holds the lines ``<!-- begin NAME -->`` and ``<!-- end NAME -->``, each once.
    name : str
    text : str
        Markdown.
    figures : mapping of captions to files
        Copied into ``images/`` beside the page, as ``NAME_...``, and shown after the
        text.
    """
    begin, end = check_page(page, name)
    shown = [text.strip()]
    for caption, source in (figures or {}).items():
        target = page.parent / "images" / f"{name}_{source.name}"
        target.parent.mkdir(parents=True, exist_ok=True)
        # With a palette, which is plenty for lines: pages on phones stay light.
        with Image.open(source) as picture:
            picture.convert("RGB").quantize(64).save(target, optimize=True)
        shown.append(f"![{caption}](images/{target.name})")
    between = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", flags=re.DOTALL)
    new = "\n\n".join([begin, *shown, end])
    page.write_text(between.sub(lambda _: new, page.read_text()))


def check_page(page: Path, name: str) -> tuple[str, str]:
    """Return the two marks, which a page must hold."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    with explained():
        text = page.read_text()
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SettingsError(f"{page} must hold {begin} and {end} once each; add them")
    return begin, end
