"""What came of attacks: a row for each, and what should not have come of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulations.chaos.hostile.probe import Sample

# What must hold: how much slower the slowest call may be, and MiB of the gate.
MAX_SLOWER, MAX_MEMORY = 3.0, 200.0


@dataclass(frozen=True)
class Row:
    """What came of one attack.

    Attributes
    ----------
    attack, tried, seen : str
        Its key, what it does, and what was answered.
    lost_rounds, wasted_steps : int
        Rounds that were skipped, and steps that honest nodes were charged and not
        asked for.
    slowest, slowest_before : float
        Seconds of an honest node's slowest call meanwhile, and without an attack.
    calls, failed_calls : int
        How many such calls there were, and how many were not answered.
    memory : float
        The gate's, in MiB, at most.
    """

    attack: str
    tried: str
    seen: str
    lost_rounds: int
    wasted_steps: int
    slowest: float
    slowest_before: float
    calls: int
    failed_calls: int
    memory: float


@dataclass(frozen=True)
class Report:
    """All attacks on one federation, and what should not have come of them.

    Attributes
    ----------
    rows : list of Row
    difference : float
        Of the model from that of a run where the node was silent, at most.
    wrong, slow : list of str
        What was believed, charged or lost, and who waited, that should not.
    """

    rows: list[Row]
    difference: float
    wrong: list[str]
    slow: list[str]


def slow(rows: Sequence[Row]) -> list[str]:
    """Say who was kept waiting, and what took too much memory."""
    found = []
    for row in rows:
        limit = MAX_SLOWER * row.slowest_before
        if row.calls and row.slowest > limit:
            found.append(
                f"{row.attack}: a call took {row.slowest:.2f} s, and without it "
                f"{row.slowest_before:.2f} s"
            )
        if row.failed_calls:
            found.append(f"{row.attack}: {row.failed_calls} calls failed")
        if row.memory > MAX_MEMORY:
            found.append(f"{row.attack}: the gate had {row.memory:.0f} MiB")
    return found


def row(
    name: str,
    tried: str,
    seen: str,
    during: Sequence[Sample],
    before: Sequence[Sample],
) -> Row:
    """Return the row of an attack, without what was lost by it."""

    def slowest(samples: Sequence[Sample]) -> float:
        return max((sample.seconds for sample in samples), default=0.0)

    return Row(
        name,
        tried,
        seen,
        lost_rounds=0,
        wasted_steps=0,
        slowest=slowest(during),
        slowest_before=slowest(before),
        calls=len(during),
        failed_calls=sum(not sample.answered for sample in during),
        memory=max((sample.memory for sample in during), default=0.0),
    )


def markdown(report: Report) -> str:
    """Return the table of the documentation: a line for each attack, at its worst."""
    by_attack: dict[str, list[Row]] = {}
    for found in report.rows:
        by_attack.setdefault(found.attack, []).append(found)
    lines = [
        "| what was tried | what was answered | rounds lost | honest steps wasted "
        "| slowest honest call (without) | gate |",
        "|---|---|---|---|---|---|",
    ]
    for rows in by_attack.values():
        first, slowest = rows[0], max(rows, key=lambda each: each.slowest)
        cells = (
            first.tried.rstrip("."),
            first.seen or "nothing, or a refusal that is counted",
            str(sum(each.lost_rounds for each in rows)),
            str(max(each.wasted_steps for each in rows)),
            f"{slowest.slowest:.2f} s ({slowest.slowest_before:.2f} s)",
            f"{max(each.memory for each in rows):.0f} MiB",
        )
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"
