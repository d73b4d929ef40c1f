"""What came of attacks: calls of an honest node meanwhile, a row for each attack."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from simulations.chaos.hostile.node import FleetNode

# What must hold: how much slower the slowest call may be, and MiB of the gate.
MAX_SLOWER, MAX_MEMORY = 3.0, 200.0
_PAUSE_SECONDS = 0.1
# Every so many calls are made over a new connection, as by a node that comes back.
_FRESH = 4


@dataclass(frozen=True)
class ProbeCall:
    """One call: when it began, seconds it took, and MiB that the gate had then."""

    time: float
    seconds: float
    memory: float
    answered: bool


class Probe:
    """Makes calls with an honest node's key, and reads the memory of process `gate`."""

    def __init__(self, node: FleetNode, gate: int) -> None:
        self._node, self._gate = node, Path(f"/proc/{gate}/status")
        self.samples: list[ProbeCall] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        count = 0
        while not self._over.wait(_PAUSE_SECONDS):
            count += 1
            begin = time.monotonic()
            try:
                if count % _FRESH:  # over a link that is named, it is made once
                    response = self._node.send_heartbeat(self._node.link)
                else:
                    with self._node.open_link() as link:
                        response = self._node.send_heartbeat(link)
                answered = response.status_code == 200
            except httpx.HTTPError:
                answered = False
            seconds = time.monotonic() - begin
            self.samples.append(
                ProbeCall(begin, seconds, self._gate_memory(), answered)
            )

    def _gate_memory(self) -> float:
        for line in self._gate.read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        return 0.0

    def between(self, begin: float, end: float) -> list[ProbeCall]:
        """Return the calls that were under way within a time."""
        return [s for s in self.samples if s.time <= end and s.time + s.seconds > begin]


@dataclass(frozen=True)
class AttackOutcome:
    """What came of one attack."""

    attack: str
    tried: str
    seen: str  # what was answered
    lost_rounds: int  # that were skipped
    wasted_steps: int  # that honest nodes were charged and not asked for
    slowest: float  # seconds of an honest node's slowest call meanwhile
    slowest_before: float  # and without an attack
    calls: int
    failed_calls: int
    memory: float  # of the gate, in MiB, at most


@dataclass(frozen=True)
class AttackReport:
    """All attacks on one federation, and what should not have come of them."""

    rows: list[AttackOutcome]
    difference: float  # of the model, at most, from a run where the node was silent
    wrong: list[str]  # what was believed, charged or lost, and should not
    slow: list[str]  # who waited, and should not


def make_outcome(
    name: str,
    tried: str,
    seen: str,
    during: Sequence[ProbeCall],
    before: Sequence[ProbeCall],
    lost_rounds: int = 0,
    wasted_steps: int = 0,
) -> AttackOutcome:
    """Return the row of an attack, of calls during it and of calls without one."""
    return AttackOutcome(
        name,
        tried,
        seen,
        lost_rounds,
        wasted_steps,
        slowest=max((sample.seconds for sample in during), default=0.0),
        slowest_before=max((sample.seconds for sample in before), default=0.0),
        calls=len(during),
        failed_calls=sum(not sample.answered for sample in during),
        memory=max((sample.memory for sample in during), default=0.0),
    )


def check_outcomes(rows: Sequence[AttackOutcome]) -> list[str]:
    """Say who was kept waiting, and what took too much memory."""
    problems = []
    for row in rows:
        if row.calls and row.slowest > MAX_SLOWER * row.slowest_before:
            problems.append(
                f"{row.attack}: a call took {row.slowest:.2f} s, and without it "
                f"{row.slowest_before:.2f} s"
            )
        if row.failed_calls:
            problems.append(f"{row.attack}: {row.failed_calls} calls failed")
        if row.memory > MAX_MEMORY:
            problems.append(f"{row.attack}: the gate had {row.memory:.0f} MiB")
    return problems


def make_markdown(rows: Sequence[AttackOutcome]) -> str:
    """Return the table of the documentation: a line for each attack, at its worst."""
    by_attack: dict[str, list[AttackOutcome]] = {}
    for row in rows:
        by_attack.setdefault(row.attack, []).append(row)
    lines = [
        "| what was tried | what was answered | rounds lost | honest steps wasted "
        "| slowest honest call (without) | gate |",
        "|---|---|---|---|---|---|",
    ]
    for group in by_attack.values():
        first, slowest = group[0], max(group, key=lambda row: row.slowest)
        cells = (
            first.tried.rstrip("."),
            first.seen or "nothing, or a refusal that is counted",
            str(sum(row.lost_rounds for row in group)),
            str(max(row.wasted_steps for row in group)),
            f"{slowest.slowest:.2f} s ({slowest.slowest_before:.2f} s)",
            f"{max(row.memory for row in group):.0f} MiB",
        )
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"
