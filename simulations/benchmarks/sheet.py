"""All benchmarks of one run on one page."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypedDict

from simulations.benchmarks.history import Entry
from simulations.benchmarks.outcome import Check, Table
from simulations.results import page
from simulations.results.tables import format_markdown as markdown_table


class Found(TypedDict):
    """What a benchmark's JSON file must have."""

    title: str
    tables: list[dict[str, object]]
    checks: list[dict[str, object]]
    costs: dict[str, float]


@dataclass(frozen=True)
class Section:
    """One benchmark.

    Attributes
    ----------
    name : str
    seconds : float
        That it took.
    outcome : Found or None
        None if it failed.
    picture : bytes or None
        PNG.
    """

    name: str
    seconds: float
    outcome: Found | None
    picture: bytes | None

    @property
    def costs(self) -> Mapping[str, float]:
        """Figures that are followed from version to version."""
        return {} if self.outcome is None else self.outcome["costs"]

    @property
    def tables(self) -> list[Table]:
        """What was measured."""
        found = [] if self.outcome is None else self.outcome["tables"]
        return [Table(**table) for table in found]  # type: ignore[arg-type]  # JSON

    @property
    def checks(self) -> list[Check]:
        """The targets."""
        found = [] if self.outcome is None else self.outcome["checks"]
        return [Check(**check) for check in found]  # type: ignore[arg-type]  # JSON


def page_of(sections: Sequence[Section], now: Entry, changes: Table | None) -> str:
    """Return the whole page: the targets first, then every benchmark."""
    facts = _facts(sections, now)
    body = ["<h1>Benchmarks</h1>", page.cards(facts), "<h2>Targets</h2>"]
    body.append(
        page.table(
            ("benchmark", "target", "measured", "bound", "", "note"),
            [
                (section.name, c.what, c.measured, c.bound, _verdict(c), c.note)
                for section in sections
                for c in section.checks
            ],
        )
    )
    if changes is not None:
        body += ["<h2>History</h2>", _table(changes)]
    for section in sections:
        body += _section(section)
    return page.whole("Benchmarks", body)


def markdown(sections: Sequence[Section], now: Entry) -> str:
    """Return the same for a page of the documentation, without the pictures."""
    facts = (f"{name}: {value}" for name, value in _facts(sections, now).items())
    blocks = [f"{'; '.join(facts)}."]
    for section in sections:
        if section.outcome is None:
            continue
        command = f"`python -m simulations.benchmarks.{section.name}`"
        blocks.append(f"### {escape(section.outcome['title'])}")
        blocks.append(f"{command}, {section.seconds:.0f} s")
        verdicts = [
            (c.what, c.measured, c.bound, _verdict(c), c.note) for c in section.checks
        ]
        heads = ("target", "measured", "bound", "", "note")
        for table in [*section.tables, Table("Targets", heads, verdicts)]:
            blocks.append(f"**{escape(table.title)}**")
            first, *rows = ([*map(_cell, line)] for line in [table.heads, *table.rows])
            blocks.append("\n".join(markdown_table(first, rows)))
            if table.caption:
                blocks.append(escape(table.caption))
    return "\n\n".join(blocks)


def _cell(text: str) -> str:
    return escape(text).replace("|", "\\|")


def _facts(sections: Sequence[Section], now: Entry) -> dict[str, str]:
    checks = [check for section in sections for check in section.checks]
    return {
        "targets that hold": f"{sum(c.holds for c in checks)} of {len(checks)}",
        "version": f"{now.version} ({now.commit})",
        "date (UTC)": now.date,
        "machine": now.machine,
        "load at the end": f"{now.load:.1f}",
        "minutes in all": f"{sum(s.seconds for s in sections) / 60:.1f}",
    }


def _verdict(check: Check) -> str:
    return "met" if check.holds else "MISSED"


def _section(section: Section) -> list[str]:
    if section.outcome is None:
        words = f"{section.name} failed; the terminal says why."
        return [
            f"<h2>{escape(section.name)}</h2>",
            f'<p class="warning">{escape(words)}</p>',
        ]
    title = section.outcome["title"]
    command = f"python -m simulations.benchmarks.{section.name}"
    parts = [
        f"<h2>{escape(title)}</h2>",
        f"<p><code>{escape(command)}</code>, {section.seconds:.0f} s</p>",
    ]
    if section.picture is not None:
        data = base64.b64encode(section.picture).decode()
        parts.append(f'<img alt="{escape(title)}" src="data:image/png;base64,{data}">')
    return [*parts, *map(_table, section.tables)]


def _table(table: Table) -> str:
    caption = f'<p class="notes">{escape(table.caption)}</p>' if table.caption else ""
    shown = page.table(table.heads, table.rows)
    return f"<h3>{escape(table.title)}</h3>{shown}{caption}"
