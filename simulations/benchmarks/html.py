"""All benchmarks of one run on one page, for a browser or for the documentation."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypedDict

from simulations.benchmarks.history import Entry
from simulations.benchmarks.result import (
    MET,
    NOT_MEASURED,
    Table,
    markdown,
)
from simulations.results import page


class SavedResult(TypedDict):
    """What the page needs of a benchmark's JSON file; the last table: thresholds."""

    title: str
    tables: list[dict[str, object]]
    costs: dict[str, float]


@dataclass(frozen=True)
class Section:
    """One benchmark: the seconds it took, its result (None: failed) and its PNG."""

    name: str
    seconds: float
    result: SavedResult | None
    picture: bytes | None

    @property
    def costs(self) -> Mapping[str, float]:
        """Figures that are followed from version to version."""
        return {} if self.result is None else self.result["costs"]

    @property
    def tables(self) -> list[Table]:
        """What was measured, and the thresholds."""
        found = [] if self.result is None else self.result["tables"]
        return [Table(**table) for table in found]  # type: ignore[arg-type]  # JSON


def write_page(sections: Sequence[Section], now: Entry, changes: Table | None) -> str:
    """Return the page in HTML: the thresholds first, then every benchmark."""
    rows = [
        (section.name, *row)
        for section in sections
        for row in (section.tables[-1].rows if section.tables else ())
    ]
    heads = ("benchmark", "threshold", "measured", "bound", "verdict", "note")
    body = ["<h1>Benchmarks</h1>", page.cards(_facts(sections, now))]
    body += ["<h2>Thresholds</h2>", page.table(heads, rows)]
    if changes is not None:
        body += ["<h2>History</h2>", _table_html(changes)]
    for section in sections:
        body += _section_html(section)
    return page.whole("Benchmarks", body)


def write_markdown(sections: Sequence[Section], now: Entry) -> str:
    """Return the same for a page of the documentation, without the pictures."""
    facts = (f"{name}: {value}" for name, value in _facts(sections, now).items())
    return "\n\n".join(
        [
            f"{'; '.join(facts)}.",
            *(
                markdown(section.result["title"], section.tables, _words(section))
                for section in sections
                if section.result is not None
            ),
        ]
    )


def _words(section: Section) -> str:
    command = f"python -m simulations.benchmarks.{section.name}"
    return f"`{command}`, {section.seconds:.0f} s"


def _facts(sections: Sequence[Section], now: Entry) -> dict[str, str]:
    tables = [section.tables[-1] for section in sections if section.tables]
    verdicts = Counter(row[3] for table in tables for row in table.rows)
    measured = verdicts.total() - verdicts[NOT_MEASURED]
    return {
        "thresholds met": f"{verdicts[MET]} of {measured}",
        "version": f"{now.version} ({now.commit})",
        "date (UTC)": now.date,
        "machine": now.machine,
        "load at the end": f"{now.load:.1f}",
        "minutes in all": f"{sum(s.seconds for s in sections) / 60:.1f}",
    }


def _section_html(section: Section) -> list[str]:
    if section.result is None:
        words = f"{section.name} failed; the terminal says why."
        return [
            f"<h2>{escape(section.name)}</h2>",
            f'<p class="warning">{escape(words)}</p>',
        ]
    title = escape(section.result["title"])
    parts = [f"<h2>{title}</h2>", f"<p>{escape(_words(section))}</p>"]
    if section.picture is not None:
        data = base64.b64encode(section.picture).decode()
        parts.append(f'<img alt="{title}" src="data:image/png;base64,{data}">')
    return [*parts, *map(_table_html, section.tables[:-1])]


def _table_html(table: Table) -> str:
    caption = f'<p class="notes">{escape(table.caption)}</p>' if table.caption else ""
    rows = page.table(table.heads, table.rows)
    return f"<h3>{escape(table.title)}</h3>{rows}{caption}"
