"""How far a deployed run is, in words: from the log of its ServerApp.

Federations say what they are doing to `LOG`; who wants to hear it listens there.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import INFO, Handler, LogRecord, getLogger
from pathlib import Path

LOG = getLogger("simulations.loopback")
LOG.propagate = False

_ROUND = re.compile(r"\[ROUND (\d+)/(\d+)\]")
_REPLIES = re.compile(r"'replies': (\d+)")
_EXCLUDED = re.compile(r"Node (\d+) is excluded")
_WAITING = re.compile(r"Waiting for nodes: (\d+ connected, \d+ needed)")


class Watch:
    """Reads the log of a run as it grows.

    Parameters
    ----------
    path : Path
        The log; it may not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._read, self._rest = path, 0, ""
        self._round = self._of = 0
        self._began = self._since = 0.0
        self._first = 0
        self._replies, self._waiting = "", ""
        self._excluded: set[str] = set()

    def words(self) -> str:
        """Return how far the run is, as far as its log says."""
        self._hear()
        if not self._of:
            return f"waiting for nodes: {self._waiting}" if self._waiting else "waiting"
        said = [f"round {self._round} of {self._of}"]
        if self._replies:
            said.append(f"{self._replies} replies in the last one")
        if self._excluded:
            said.append(f"nodes excluded so far: {len(self._excluded)}")
        if self._round > self._first:
            each = (self._since - self._began) / (self._round - self._first)
            left = each * (self._of - self._round + 1)
            left -= time.monotonic() - self._since
            said.append(f"about {_time(max(left, 0.0))} left")
        return ", ".join(said)

    def _hear(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        self._read += len(new)
        *lines, self._rest = (self._rest + new.decode(errors="replace")).split("\n")
        for line in lines:
            if found := _ROUND.search(line):
                self._round, self._of = int(found[1]), int(found[2])
                self._since = time.monotonic()
                if not self._first:
                    self._first, self._began = self._round, self._since
            elif found := _REPLIES.search(line):
                self._replies = found[1]
            elif found := _EXCLUDED.search(line):
                self._excluded.add(found[1])
            elif found := _WAITING.search(line):
                self._waiting = found[1]


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class _Listener(Handler):
    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(INFO)
        self._tell = tell

    def emit(self, record: LogRecord) -> None:
        self._tell(record.getMessage())


@contextmanager
def report_rounds(tell: Callable[[str], None]) -> Iterator[None]:
    """Let somebody hear what federations of this process are doing."""
    listener, before = _Listener(tell), LOG.level
    LOG.addHandler(listener)
    LOG.setLevel(INFO)
    try:
        yield
    finally:
        LOG.removeHandler(listener)
        LOG.setLevel(before)
