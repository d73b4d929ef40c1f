"""The chain of charges in a ledger file.

Rows of charges are only ever added; each carries a SHA-256 over itself and the row
before it, the first over the limits, and the newest is repeated in a row of its own, so
a lost, changed or reordered row shows. (Whoever may write the file can compute such
hashes too: they are against accidents, not against its owner.)
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from flwr_safedshb.privacy.accounting.limits import checked_steps
from flwr_safedshb.privacy.ledger.database import (
    LedgerCorrupted,
    LedgerError,
    begin,
    connect,
    explained,
    refusal,
)
from flwr_safedshb.privacy.plan import PrivacyPlan

_First = TypeVar("_First")
_Second = TypeVar("_Second")
# Connections of a parent process: using or closing them in a child would break locks.
_inherited: list[sqlite3.Connection] = []


@dataclass(frozen=True)
class Charge:
    """One entry: ``steps`` releases under ``plan`` in ``run``, at ``time`` (UTC)."""

    time: str
    run: str
    plan: PrivacyPlan
    steps: int


Totals = dict[PrivacyPlan, int]


@dataclass
class _Read:
    """What has been read and verified so far."""

    count: int
    head: bytes
    totals: Totals = field(default_factory=dict)

    def add(self, plan: PrivacyPlan, steps: int, digest: bytes) -> None:
        self.count, self.head = self.count + 1, digest
        self.totals[plan] = self.totals.get(plan, 0) + steps


class Store:
    """An existing ledger file.

    Parameters
    ----------
    path : Path
        Must exist.
    """

    def __init__(self, path: Path) -> None:
        # A journal lies beside the file's real name, whatever name opened it.
        self.path = Path(os.path.realpath(path))
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._inode: int | None = None
        self._written, self._disturbed = (0, 0), True
        self._appended: tuple[PrivacyPlan, int, bytes] | None = None
        with self.transaction() as connection:
            (answer,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            if answer != "ok":
                raise LedgerCorrupted(refusal(self.path, "its pages are damaged"))
            self.max_epsilon, self.delta = self._row(
                connection, "SELECT max_epsilon, delta FROM ledger", float, float
            )
            self._read = _Read(0, genesis(self.max_epsilon, self.delta))
            self.totals(connection)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Hold the file; on success everything is on disk when the block is left."""
        if self._pid != os.getpid():
            self._forget_parent()
        with self._lock:
            self._appended = None
            try:
                if self._written != self._state():  # by somebody else
                    self._disturbed = True
                    self.close()  # it may remember pages as they were
                connection = self._open()
                begin(connection, self.path)
                self._check_identity()
                yield connection
                connection.execute("COMMIT")
                self._written = self._state()
            except BaseException as error:
                self.close()
                if isinstance(error, sqlite3.Error | UnicodeDecodeError):
                    raise explained(self.path, error) from error
                raise
            if self._appended is not None:
                self._read.add(*self._appended)

    def totals(self, connection: sqlite3.Connection) -> Totals:
        """Return the steps charged under each plan; verify rows not seen before.

        If anybody else has written to the file, all of them: it may be damaged.
        """
        # Rows once seen must stay, so this object also notices a file rolled back.
        known = read = self._read
        if self._disturbed:
            read = _Read(0, genesis(self.max_epsilon, self.delta))
        rows = connection.execute(
            "SELECT c.id, time, run, p.plan, steps, hash FROM charges c "
            "LEFT JOIN plans p ON p.id = c.plan WHERE c.id > ? ORDER BY c.id",
            (read.count,),
        )
        for number, time, run, text, steps, digest in rows:
            try:
                expected = _digest(read.head, [number, time, run, text, steps])
            except TypeError:
                expected = b""
            if number != read.count + 1 or digest != expected:
                raise LedgerCorrupted(refusal(self.path, "a charge was changed"))
            plan = self._plan(number, text, steps)
            read.add(plan, steps, digest)
            if read.count == known.count and read.head != known.head:
                raise LedgerCorrupted(refusal(self.path, "a charge was changed"))
        newest = (read.count, read.head) == self._newest(connection)
        if not newest or read.count < known.count:
            raise LedgerCorrupted(refusal(self.path, "a charge is missing"))
        self._read, self._disturbed = read, False
        return read.totals

    def _plan(self, number: int, text: str, steps: int) -> PrivacyPlan:
        """Read what a charge is for; it counts, so one that cannot be read ends all."""
        try:
            if not checked_steps(steps):
                raise ValueError("steps=0 must be at least 1")
            return _plan_of(text)
        except (TypeError, ValueError) as error:
            raise LedgerError(
                f"the ledger {self.path} has a charge, number {number}, that cannot be "
                f"accounted for: {error}; install what wrote it, or take no further "
                "part with these data"
            ) from error

    def append(
        self,
        plan: PrivacyPlan,
        steps: int,
        run: str,
        fitting: Totals,
        learn: Callable[[Totals], Totals] | None = None,
    ) -> Totals | None:
        """Add a charge that is known to fit; return None once it is on disk.

        Of one that is not known to fit, return what is charged so far instead.

        Parameters
        ----------
        plan, steps, run
            The charge.
        fitting : dict from plans to steps
            Charges that are known to fit together, and so do fewer.
        learn : callable, optional
            Finds such charges, while nobody else can make any.
        """
        with self.transaction() as connection:
            totals = dict(self.totals(connection))
            if learn is not None:
                fitting = learn(totals)
            after = {**totals, plan: totals.get(plan, 0) + steps}
            if any(fitting.get(each, 0) < count for each, count in after.items()):
                return totals
            count, head, text = self._read.count + 1, self._read.head, _text_of(plan)
            connection.execute("INSERT OR IGNORE INTO plans (plan) VALUES (?)", (text,))
            row = [count, now(), run, text, steps]
            digest = _digest(head, row)
            connection.execute(
                "INSERT INTO charges SELECT ?, ?, ?, id, ?, ? FROM plans WHERE plan=?",
                (*row[:3], steps, digest, text),
            )
            connection.execute("UPDATE ledger SET count = ?, head = ?", (count, digest))
            self._appended = plan, steps, digest
        return None

    def charges(self, connection: sqlite3.Connection) -> list[Charge]:
        """Return every charge, oldest first."""
        self.totals(connection)
        rows = connection.execute(
            "SELECT time, run, p.plan, steps FROM charges c "
            "JOIN plans p ON p.id = c.plan ORDER BY c.id"
        )
        return [
            Charge(time, run, _plan_of(text), steps) for time, run, text, steps in rows
        ]

    def close(self) -> None:
        """Release the file; the next transaction opens it again."""
        connection, self._connection = self._connection, None
        if connection is not None and self._pid == os.getpid():
            with suppress(sqlite3.Error):
                connection.close()  # rolls back what was not committed

    def _forget_parent(self) -> None:
        if self._connection is not None:
            _inherited.append(self._connection)
        self._connection = None
        self._pid, self._lock = os.getpid(), threading.RLock()

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = connect(self.path)
            self._inode = self._inode or self.path.stat().st_ino
        return self._connection

    def _newest(self, connection: sqlite3.Connection) -> tuple[int, bytes]:
        return self._row(connection, "SELECT count, head FROM ledger", int, bytes)

    def _row(
        self,
        connection: sqlite3.Connection,
        query: str,
        one: type[_First],
        two: type[_Second],
    ) -> tuple[_First, _Second]:
        match connection.execute(query).fetchall():
            case [(first, second)]:
                if isinstance(first, one) and isinstance(second, two):
                    return first, second
        raise LedgerCorrupted(refusal(self.path, "its limits are damaged"))

    def _state(self) -> tuple[int, int]:
        """Return what changes whenever somebody writes to the file."""
        found = self.path.stat() if self.path.exists() else None
        return (found.st_mtime_ns, found.st_size) if found else (0, 0)

    def _check_identity(self) -> None:
        # Charges written to a file that was removed or replaced would be lost.
        if not self.path.exists() or self.path.stat().st_ino != self._inode:
            raise LedgerError(
                f"the ledger {self.path} was removed or replaced while in use; put it "
                "back, or start again if the change was meant"
            )


# A ledger has many charges of few plans.
_plan_of = lru_cache(maxsize=1024)(PrivacyPlan.from_json)
_text_of = lru_cache(maxsize=1024)(PrivacyPlan.to_json)


def now() -> str:
    """Return the time as ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def genesis(max_epsilon: float, delta: float) -> bytes:
    """Return the hash that the first charge continues, so that it covers the limits."""
    return _digest(b"", [max_epsilon, delta])


def _digest(before: bytes, row: Sequence[object]) -> bytes:
    return hashlib.sha256(before + json.dumps(row).encode()).digest()
