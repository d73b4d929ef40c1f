"""The entries in a ledger file, and how one more gets there.

An entry is a charge, or a commitment to charges. Entries are only ever added; each
carries a SHA-256 over itself and the entry before it, the first over the limits and the
unit, and the newest is repeated in a row of its own, so a lost, changed or reordered
entry shows. (Whoever may write the file can compute such hashes too: they are against
accidents, not against its owner.)

Formal guarantees
-----------------
- When `Store.charge` returns, the charge is on disk: a crash, a kill or a power cut at
  any moment may waste budget, and never hides a release.
- The charges of all processes, runs and plans together never exceed the budget: one
  process at a time decides, and it sees every entry before its own. `budget` says
  which histories are within the budget, and why.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
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
from typing import cast, get_args

from flwr_safedshb.privacy.accounting.ranges import check_steps, shorten
from flwr_safedshb.privacy.ledger.database import (
    LedgerCorrupted,
    LedgerError,
    check_marks,
    connect,
    explained,
    refusal,
)
from flwr_safedshb.privacy.ledger.history import History, Kind, Totals, is_within
from flwr_safedshb.privacy.plan import Adjacency, PrivacyPlan
from flwr_safedshb.sanitize import SAFE_NAME

_WAIT_SECONDS = 120.0
# Attempts after which accounting is done while other processes wait.
_PATIENCE = 2
# What a run is committed to: plans, and at most how many steps of each.
Block = Sequence[tuple[PrivacyPlan, int]]
# Connections of a parent process: using or closing them in a child would break locks.
_inherited: list[sqlite3.Connection] = []


class BudgetExhausted(RuntimeError):  # noqa: N818  # the name users wait for
    """The charge would exceed the budget; nothing was charged."""


@dataclass(frozen=True)
class Fitting:
    """Charges that fit together after a first block, and so do fewer."""

    first: Totals = field(default_factory=dict)
    charged: Totals = field(default_factory=dict)

    def allows(self, first: Totals, charged: Totals) -> bool:
        """Return whether these charges are known to fit after this first block."""
        return self.first == first and is_within(charged, self.charged)


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
        self._appended: list[tuple[Kind, str, PrivacyPlan, int, bytes]] = []
        # A longer history is asked anew.
        self._fitting = Fitting()
        with self._transaction() as connection:
            (answer,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            if answer != "ok":
                raise LedgerCorrupted(refusal(self.path, "its pages are damaged"))
            limits = connection.execute("SELECT max_epsilon, delta, unit FROM ledger")
            match limits.fetchall():
                case [(float() as max_epsilon, float() as delta, str() as unit)] if (
                    unit in get_args(Adjacency)
                ):
                    self.max_epsilon, self.delta = max_epsilon, delta
                    self.unit = cast(Adjacency, unit)
                case _:
                    raise LedgerCorrupted(refusal(self.path, "its limits are damaged"))
            self._genesis = genesis(max_epsilon, delta, unit)
            self._read = History(0, self._genesis)
            self._history(connection)

    def charge(self, plan: PrivacyPlan, steps: int = 1, run: str | int = "") -> None:
        """Charge ``steps`` releases under ``plan``; on disk when this returns.

        Raises
        ------
        ValueError
            If `run` is not a plain name: it is kept for the ledger's life. Or if the
            plan's sampler has no accountant for the ledger's unit.
        BudgetExhausted
            If all charges together would exceed ``max_epsilon``; none is made.
        LedgerError
            If the charge could not be written: release nothing.
        """
        steps, name = _count(steps), _name(run)
        same, fitting = _in_unit(plan, self.unit), self._fitting
        for attempt in itertools.count():
            with self._transaction() as connection:
                history = self._history(connection).copy()
                first = history.first or {same: steps}
                charged = history.charged
                charged[same] = charged.get(same, 0) + steps
                if attempt >= _PATIENCE:
                    fitting = self._learn(same, charged, first)
                if fitting.allows(first, charged):
                    self._append(connection, "charge", plan, steps, name)
                    return
            # Seconds of accounting, so not while others wait for the file; if they
            # change the history meanwhile, the next attempt notices.
            fitting = self._learn(same, charged, first)
            if not fitting.allows(first, charged):
                raise BudgetExhausted(
                    f"{steps} more steps would exceed max_epsilon={self.max_epsilon:g} "
                    f"at delta={self.delta:g}; nothing was charged, and this node can "
                    "take no further part under this plan"
                )

    def commit(
        self, block: Sequence[tuple[PrivacyPlan, int]], run: str | int = ""
    ) -> None:
        """Commit a run to plans and their most steps, before its first release.

        The first commitment of a ledger, if nothing was charged before it, is accounted
        whole, by its privacy loss distribution: charges of plans that cost the same are
        then paid for, whatever their order and run. One that is larger than the budget
        is cut to the largest share that fits. Any later commitment says only what its
        run is to cost alone. A run that has an entry already is committed no more.

        Parameters
        ----------
        block : sequence of (PrivacyPlan, int)
            Plans, and at most how many steps of each; 0 for none.
        run : str or int
            A plain name.

        Raises
        ------
        ValueError
        LedgerError
            If it could not be written.
        """
        name = _name(run)
        if name in self._read.runs:  # entries never go away
            return
        wanted = [(plan, check_steps(steps)) for plan, steps in block]
        for plan, _ in wanted:
            _in_unit(plan, self.unit)
        if self._read.first and not self._has_room(wanted):
            return  # or a server could fill the file of a ledger that is spent
        cut = None
        while True:
            with self._transaction() as connection:
                history = self._history(connection)
                if name in history.runs:
                    return
                kept = wanted if history.first else cut
                if kept is not None:
                    for plan, steps in kept:
                        if steps:
                            self._append(connection, "commit", plan, steps, name)
                    return
            cut = self._cut(wanted)  # seconds, so not while others wait
            if cut != wanted:
                logging.getLogger(__name__).warning(
                    "ledger %s: run %s asks for up to %s steps of its plans, and the "
                    "budget allows %s: the run will end with the budget",
                    self.path,
                    name,
                    " and ".join(str(steps) for _, steps in wanted),
                    " and ".join(str(steps) for _, steps in cut),
                )

    @abstractmethod
    def _learn(self, plan: PrivacyPlan, charged: Totals, first: Totals) -> Fitting:
        """Return, and remember, charges that fit: these, with more of ``plan``."""

    @abstractmethod
    def _has_room(self, block: Block) -> bool:
        """Return whether a step of any plan of a block still fits."""

    @abstractmethod
    def _cut(self, block: Block) -> Block:
        """Return the largest share of a block that fits into an empty ledger."""

    def _append(
        self,
        connection: sqlite3.Connection,
        kind: Kind,
        plan: PrivacyPlan,
        steps: int,
        run: str,
    ) -> None:
        """Add an entry; on disk once the transaction has ended."""
        count = self._read.count + len(self._appended) + 1
        head = self._appended[-1][-1] if self._appended else self._read.head
        text = _text_of(plan)
        connection.execute("INSERT OR IGNORE INTO plans (plan) VALUES (?)", (text,))
        row = [count, now(), run, kind, text, steps]
        digest = _digest(head, row)
        connection.execute(
            "INSERT INTO entries SELECT ?, ?, ?, ?, id, ?, ? FROM plans WHERE plan=?",
            (*row[:4], steps, digest, text),
        )
        connection.execute("UPDATE ledger SET count = ?, head = ?", (count, digest))
        same = _in_unit(plan, self.unit)
        self._appended.append((kind, run, same, steps, digest))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Hold the file; on success everything is on disk when the block is left."""
        if self._pid != os.getpid():
            self._forget_parent()
        with self._lock:
            self._appended = []
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
            for entry in self._appended:
                self._read.add(*entry)

    def _history(self, connection: sqlite3.Connection) -> History:
        """Return all entries, added up; verify those not seen before.

        If anybody else has written to the file, all of them: it may be damaged.
        """
        # Entries once seen must stay, so this object also notices a file rolled back.
        known = self._read
        read = History(0, self._genesis) if self._disturbed else known
        rows = connection.execute(
            "SELECT e.id, time, run, kind, p.plan, steps, hash FROM entries e "
            "LEFT JOIN plans p ON p.id = e.plan WHERE e.id > ? ORDER BY e.id",
            (read.count,),
        )
        for number, time, run, kind, text, steps, digest in rows:
            try:
                expected = _digest(read.head, [number, time, run, kind, text, steps])
            except TypeError:
                expected = b""
            if number != read.count + 1 or digest != expected:
                raise LedgerCorrupted(refusal(self.path, "an entry was changed"))
            read.add(kind, run, self._plan(number, kind, text, steps), steps, digest)
            if read.count == known.count and read.head != known.head:
                raise LedgerCorrupted(refusal(self.path, "an entry was changed"))
        newest = connection.execute("SELECT count, head FROM ledger").fetchall()
        if newest != [(read.count, read.head)] or read.count < known.count:
            raise LedgerCorrupted(refusal(self.path, "an entry is missing"))
        self._read, self._disturbed = read, False
        return read

    def _plan(self, number: int, kind: str, text: str, steps: int) -> PrivacyPlan:
        """Read what an entry is for; it counts, so one that cannot be read ends all."""
        try:
            if not check_steps(steps):
                raise ValueError("steps=0 must be at least 1")
            if kind not in get_args(Kind):
                raise ValueError(f"kind={kind!r} is unknown")
            return _in_unit(plan_of(text), self.unit)
        except (TypeError, ValueError) as error:
            raise LedgerError(
                f"the ledger {self.path} has an entry, number {number}, that cannot be "
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
_in_unit = lru_cache(maxsize=1024)(PrivacyPlan.convert_to_unit)


def _count(steps: int, least: int = 1) -> int:
    if isinstance(steps, bool) or not isinstance(steps, Integral) or steps < least:
        raise ValueError(
            f"steps={shorten(steps)} must be an integer of at least {least}"
        )
    return int(steps)


def _name(run: str | int) -> str:
    name = str(run)
    if name and not SAFE_NAME.fullmatch(name):
        raise ValueError(
            f"run={name[:80]!r} must be up to 64 letters, digits, '.', '_' and "
            "'-', and begin with a letter or digit"
        )
    return name


def now() -> str:
    """Return the time as ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def genesis(max_epsilon: float, delta: float, unit: str) -> bytes:
    """Return the hash that the first entry continues: of the limits and the unit."""
    return _digest(b"", [max_epsilon, delta, unit])


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
    check_marks(connection, path)
