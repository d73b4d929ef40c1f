"""How an honest node's calls fare, and how much memory the gate takes, meanwhile."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from simulations.chaos.hostile.speaker import Speaker

_PAUSE_SECONDS = 0.1
# Every so many calls are made over a new connection, as by a node that comes back.
_FRESH = 4


@dataclass(frozen=True)
class Sample:
    """One call: when it began, seconds it took, and MiB that the gate had then."""

    time: float
    seconds: float
    memory: float
    answered: bool


class Probe:
    """Makes calls of an honest node, as often as that is no attack.

    Parameters
    ----------
    node : Speaker
        With the key of an honest node, whose calls these are.
    gate : int
        The process of the gate.
    """

    def __init__(self, node: Speaker, gate: int) -> None:
        self._node, self._gate = node, gate
        self.samples: list[Sample] = []
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
                    found = self._node.beat(self._node.link)
                else:
                    with self._node.connected() as link:
                        found = self._node.beat(link)
                answered = found.status_code == 200
            except httpx.HTTPError:
                answered = False
            seconds = time.monotonic() - begin
            memory = resident_mebibytes(self._gate)
            self.samples.append(Sample(begin, seconds, memory, answered))

    def between(self, begin: float, end: float) -> list[Sample]:
        """Return the calls that were under way within a time."""
        return [s for s in self.samples if s.time <= end and s.time + s.seconds > begin]


def resident_mebibytes(process: int) -> float:
    """Return the memory of a process, in MiB."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0
