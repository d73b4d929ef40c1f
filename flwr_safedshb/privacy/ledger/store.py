"""The charges in a ledger file, and how one more gets there.

Rows of charges are only ever added; each carries a SHA-256 over itself and the row
before it, the first over the limits, and the newest is repeated in a row of its own, so
a lost, changed or reordered row shows. (Whoever may write the file can compute such
hashes too: they are against accidents, not against its owner.)

Formal guarantees
-----------------
- When `Store.charge` returns, the charge is on disk: a crash, a kill or a power cut at
  any moment may waste budget, and never hides a release.
- The charges of all processes, runs and plans together never exceed the budget: one
  process at a time decides, and it sees every charge before its own.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from numbers import Integral
from pathlib import Path
from time import monotonic, sleep

from flwr_safedshb.privacy.accounting.limits import checked_steps
from flwr_safedshb.privacy.ledger.database import (
    MARKS,
    LedgerCorrupted,
    LedgerError,
    connect,
    explained,
    refusal,
)
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.words import PLAIN

_WAIT_SECONDS = 120.0
# Attempts after which accounting is done while other processes wait.
_PATIENCE = 2
# Connections of a parent process: using or closing them in a child would break locks.
_inherited: list[sqlite3.Connection] = []

Totals = dict[PrivacyPlan, int]


class BudgetExhausted(RuntimeError):  # noqa: N818  # the name users wait for
    """The charge would exceed the budget; nothing was charged."""


@dataclass
class _Read:
    """What has been read and verified so far."""

    count: int
    head: bytes
    totals: Totals = field(default_factory=dict)

    def add(self, plan: PrivacyPlan, steps: int, digest: bytes) -> None:
        self.count, self.head = self.count + 1, digest
        self.totals[plan] = self.totals.get(plan, 0) + steps


class Store(ABC):
    """An existing ledger file; `Ledger` adds what charges cost, and which fit."""

    def __init__(self, path: Path) -> None:
        # A journal lies beside the file's real name, whatever name opened it.
        self.path = Path(os.path.realpath(path))
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._inode: int | None = None
        self._written, self._disturbed = (0, 0), True
        self._appended: tuple[PrivacyPlan, int, bytes] | None = None
        # Charges that fit together, and so do fewer; a longer history is asked anew.
        self._fitting: Totals = {}
        with self._transaction() as connection:
            (answer,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            if answer != "ok":
                raise LedgerCorrupted(refusal(self.path, "its pages are damaged"))
            limits = connection.execute("SELECT max_epsilon, delta FROM ledger")
            match limits.fetchall():
                case [(float() as max_epsilon, float() as delta)]:
                    self.max_epsilon, self.delta = max_epsilon, delta
                case _:
                    raise LedgerCorrupted(refusal(self.path, "its limits are damaged"))
            self._genesis = genesis(self.max_epsilon, self.delta)
            self._read = _Read(0, self._genesis)
            self._totals(connection)

    def charge(self, plan: PrivacyPlan, steps: int = 1, run: str | int = "") -> None:
        """Charge ``steps`` releases under ``plan``; on disk when this returns.

        Raises
        ------
        ValueError
            If `run` is not a plain name: it is kept for the ledger's life.
        BudgetExhausted
            If all charges together would exceed ``max_epsilon``; none is made.
        LedgerError
            If the charge could not be written: release nothing.
        """
        if isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 1:
            raise ValueError(f"steps={steps!r} must be an integer of at least 1")
        name = str(run)
        if name and not PLAIN.fullmatch(name):
            raise ValueError(
                f"run={name[:80]!r} must be up to 64 letters, digits, '.', '_' and "
                "'-', and begin with a letter or digit"
            )
        steps, fitting = int(steps), self._fitting
        for attempt in itertools.count():
            with self._transaction() as connection:
                totals = dict(self._totals(connection))
                after = {**totals, plan: totals.get(plan, 0) + steps}
                if attempt >= _PATIENCE:
                    fitting = self._learn(plan, steps, totals)
                if all(fitting.get(each, 0) >= count for each, count in after.items()):
                    self._append(connection, plan, steps, name)
                    return
            # Seconds of accounting, so not while others wait for the file; if they
            # change the history meanwhile, the next attempt notices.
            fitting = self._learn(plan, steps, totals)
            if fitting[plan] < after[plan]:
                raise BudgetExhausted(
                    f"{steps} more steps would exceed max_epsilon={self.max_epsilon:g} "
                    f"at delta={self.delta:g}; nothing was charged, and this node can "
                    "take no further part under this plan"
                )

    @abstractmethod
    def _learn(self, plan: PrivacyPlan, steps: int, totals: Totals) -> Totals:
        """Return, and remember, these charges with as many of ``plan`` as also fit."""

    def _append(
        self, connection: sqlite3.Connection, plan: PrivacyPlan, steps: int, run: str
    ) -> None:
        """Add a charge; on disk once the transaction has ended."""
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

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
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
                _begin(connection, self.path)
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

    def _totals(self, connection: sqlite3.Connection) -> Totals:
        """Return the steps charged under each plan; verify rows not seen before.

        If anybody else has written to the file, all of them: it may be damaged.
        """
        # Rows once seen must stay, so this object also notices a file rolled back.
        known = self._read
        read = _Read(0, self._genesis) if self._disturbed else known
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
            read.add(self._plan(number, text, steps), steps, digest)
            if read.count == known.count and read.head != known.head:
                raise LedgerCorrupted(refusal(self.path, "a charge was changed"))
        newest = connection.execute("SELECT count, head FROM ledger").fetchall()
        if newest != [(read.count, read.head)] or read.count < known.count:
            raise LedgerCorrupted(refusal(self.path, "a charge is missing"))
        self._read, self._disturbed = read, False
        return read.totals

    def _plan(self, number: int, text: str, steps: int) -> PrivacyPlan:
        """Read what a charge is for; it counts, so one that cannot be read ends all."""
        try:
            if not checked_steps(steps):
                raise ValueError("steps=0 must be at least 1")
            return plan_of(text)
        except (TypeError, ValueError) as error:
            raise LedgerError(
                f"the ledger {self.path} has a charge, number {number}, that cannot be "
                f"accounted for: {error}; install what wrote it, or take no further "
                "part with these data"
            ) from error

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
plan_of = lru_cache(maxsize=1024)(PrivacyPlan.from_json)
_text_of = lru_cache(maxsize=1024)(PrivacyPlan.to_json)


def now() -> str:
    """Return the time as ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def genesis(max_epsilon: float, delta: float) -> bytes:
    """Return the hash that the first charge continues, so that it covers the limits."""
    return _digest(b"", [max_epsilon, delta])


def _digest(before: bytes, row: Sequence[object]) -> bytes:
    return hashlib.sha256(before + json.dumps(row).encode()).digest()


def _begin(connection: sqlite3.Connection, path: Path) -> None:
    """Wait until this process is the only one that may read and write the file."""
    deadline = monotonic() + _WAIT_SECONDS
    # SQLite's own waiting slows down to ten looks a second, and so hardly ever finds
    # the gap between two charges of a busy process.
    connection.execute("PRAGMA busy_timeout = 0")
    while True:
        try:
            connection.execute("BEGIN IMMEDIATE")
            break
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not busy or monotonic() > deadline:
                raise
        sleep(random.uniform(0.0005, 0.0015))
    # What is left to wait for is others who are just looking.
    connection.execute(f"PRAGMA busy_timeout = {_WAIT_SECONDS * 1000:.0f}")
    for pragma, mine in MARKS.items():
        (found,) = connection.execute(f"PRAGMA {pragma}").fetchone()
        if found != mine:
            raise LedgerCorrupted(refusal(path, f"its {pragma} is {found}, not {mine}"))
