"""All benchmarks of one run on one page, for a browser or for the documentation."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from simulations.benchmarks.history import Entry
from simulations.benchmarks.result import (
    MET,
    NOT_MEASURED,
    THRESHOLD_HEADS,
    ResultTable,
    format_markdown,
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
    def tables(self) -> list[ResultTable]:
        """What was measured, and the thresholds."""
        found = [] if self.result is None else self.result["tables"]
        return [ResultTable(**table) for table in found]  # type: ignore[arg-type]  # JSON


def write_markdown(sections: Sequence[Section], now: Entry) -> str:
    """Return a run for the documentation: the thresholds first, and no pictures."""
    return "\n\n".join([_summarize(sections, now), *map(_describe, sections)])


def write_page(
    sections: Sequence[Section], now: Entry, changes: ResultTable | None
) -> str:
    """Return the same as a page that loads nothing, with pictures and the history."""
    blocks = ["# Benchmarks", _summarize(sections, now)]
    if changes is not None:
        blocks.append(format_markdown("History", [changes]))
    for section in sections:
        blocks.append(_describe(section))
        if section.picture is not None:
            data = base64.b64encode(section.picture).decode()
            blocks.append(f"![{section.name}](data:image/png;base64,{data})")
    body = page.markdown("\n\n".join(blocks))
    body = body.replace("<table>", '<div class="scroll"><table>')
    return page.whole("Benchmarks", [body.replace("</table>", "</table></div>")])


def _summarize(sections: Sequence[Section], now: Entry) -> str:
    rows = [
        (section.name, *row)
        for section in sections
        for row in (section.tables[-1].rows if section.tables else ())
    ]
    verdicts = Counter(row[4] for row in rows)
    facts = {
        "thresholds met": f"{verdicts[MET]} of {len(rows) - verdicts[NOT_MEASURED]}",
        "version": f"{now.version} ({now.commit})",
        "date (UTC)": now.date,
        "machine": now.machine,
        "load at the end": f"{now.load:.1f}",
        "minutes in all": f"{sum(s.seconds for s in sections) / 60:.1f}",
    }
    words = "; ".join(f"{name}: {value}" for name, value in facts.items())
    table = ResultTable("All benchmarks", ("benchmark", *THRESHOLD_HEADS), rows)
    return format_markdown("Thresholds", [table], f"{words}.")


def _describe(section: Section) -> str:
    if section.result is None:
        return (
            f"### {section.name}\n\n**{section.name} failed; the terminal says why.**"
        )
    command = f"python -m simulations.benchmarks.{section.name}"
    words = f"`{command}`, {section.seconds:.0f} s"
    return format_markdown(section.result["title"], section.tables[:-1], words)
