"""Read, verify and append the entries of a ledger file.

An entry is a charge or a commitment. The entries are append-only and form a hash chain:
each has a SHA-256 of itself and of the hash before it; the chain starts from the limits
and the unit; and the newest hash is repeated in a row of its own. So a lost, changed or
reordered entry is detected. (The chain guards against accidents, not against a person
who can write the file and compute the hashes.)

Formal guarantees
-----------------
- When a transaction ends without an error, its entries are on disk. A crash, a kill or
  a power cut at any moment may waste budget but never loses the charge of a release.
- Transactions are exclusive, and each sees all entries of those before it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import cast, get_args

from flwr_safedshb.privacy.accounting.ranges import DELTA, EPSILON, check_steps
from flwr_safedshb.privacy.ledger.database import (
    LedgerError,
    begin_transaction,
    explain_error,
    make_damage_error,
    open_database,
)
from flwr_safedshb.privacy.ledger.history import History, Kind
from flwr_safedshb.privacy.plan import PrivacyPlan, PrivacyUnit

# Connections of a parent process, kept open: closing one in a child would break locks.
_inherited: list[sqlite3.Connection] = []

# Cached, because a ledger has many charges of few plans.
parse_plan = lru_cache(maxsize=1024)(PrivacyPlan.from_json)
_write_plan = lru_cache(maxsize=1024)(PrivacyPlan.to_json)
convert_to_unit = lru_cache(maxsize=1024)(PrivacyPlan.convert_to_unit)


class LedgerFile:
    """An existing ledger file; it is verified when opened and whenever it has changed.

    Attributes
    ----------
    path : Path
        The file, by its real name.
    max_epsilon, delta : float
        The limits that it was created with.
    unit : PrivacyUnit
        Its unit of privacy.
    """

    def __init__(self, path: Path) -> None:
        # A journal lies beside the file's real name, whatever name opened it.
        self.path = Path(os.path.realpath(path))
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._inode: int | None = None
        self._written, self._disturbed = (0, 0), True
        self._appended: list[tuple[Kind, str, PrivacyPlan, int, bytes]] = []
        with self._lock_file() as connection:
            (answer,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            if answer != "ok":
                raise make_damage_error(self.path, "its pages are damaged")
            limits = connection.execute("SELECT max_epsilon, delta, unit FROM ledger")
            match limits.fetchall():
                case [(float() as max_epsilon, float() as delta, str() as unit)] if (
                    EPSILON.contains(max_epsilon)
                    and DELTA.contains(delta)
                    and unit in get_args(PrivacyUnit)
                ):
                    self.max_epsilon, self.delta = max_epsilon, delta
                    self.unit = cast(PrivacyUnit, unit)
                case _:
                    raise make_damage_error(self.path, "its limits are damaged")
            self._genesis = hash_limits(max_epsilon, delta, unit)
            self._known = History(0, self._genesis)
            self._read_entries(connection)

    @property
    def runs(self) -> set[str]:
        """The runs that had an entry when the file was last read."""
        return self._known.runs

    @contextmanager
    def transaction(self) -> Iterator[History]:
        """Lock the file and yield its history; on success all entries are on disk.

        Entries appended inside the block are added to the history after it.
        """
        with self._lock_file() as connection:
            yield self._read_entries(connection)

    def append(self, kind: Kind, plan: PrivacyPlan, steps: int, run: str) -> None:
        """Append an entry, inside a transaction."""
        connection = self._open()
        count = self._known.count + len(self._appended) + 1
        head = self._appended[-1][-1] if self._appended else self._known.head
        text = _write_plan(plan)
        connection.execute("INSERT OR IGNORE INTO plans (plan) VALUES (?)", (text,))
        row = [count, get_time(), run, kind, text, steps]
        digest = hash_entry(head, row)
        connection.execute(
            "INSERT INTO entries SELECT ?, ?, ?, ?, id, ?, ? FROM plans WHERE plan=?",
            (*row[:4], steps, digest, text),
        )
        connection.execute("UPDATE ledger SET count = ?, head = ?", (count, digest))
        same = convert_to_unit(plan, self.unit)
        self._appended.append((kind, run, same, steps, digest))

    def list_entries(self, kind: Kind) -> list[tuple[str, str, PrivacyPlan, int]]:
        """Return time, run, plan and steps of every entry of a kind, oldest first."""
        with self._lock_file() as connection:
            self._read_entries(connection)
            rows = connection.execute(
                "SELECT time, run, p.plan, steps FROM entries e JOIN plans p "
                "ON p.id = e.plan WHERE kind = ? ORDER BY e.id",
                (kind,),
            ).fetchall()
        return [(time, run, parse_plan(text), steps) for time, run, text, steps in rows]

    def read_last_charge(self, run: str) -> tuple[bytes, list[object], bytes]:
        """Return the newest charge of a run: the hash before it, its row, its hash.

        Raises
        ------
        ValueError
            If the run has no charge.
        """
        with self._lock_file() as connection:
            self._read_entries(connection)
            found = connection.execute(
                "SELECT e.id, time, run, kind, p.plan, steps, hash FROM entries e "
                "JOIN plans p ON p.id = e.plan WHERE run = ? AND kind = 'charge' "
                "ORDER BY e.id DESC LIMIT 1",
                (run,),
            ).fetchone()
            if found is None:
                raise ValueError(f"run={run!r} has no charge in the ledger")
            *row, head = found
            query = "SELECT hash FROM entries WHERE id = ?"
            before = connection.execute(query, (row[0] - 1,)).fetchone()
        return (self._genesis if before is None else before[0]), row, head

    def close(self) -> None:
        """Release the file; the next transaction opens it again."""
        connection, self._connection = self._connection, None
        if connection is not None and self._pid == os.getpid():
            with suppress(sqlite3.Error):
                connection.close()  # rolls back what was not committed

    @contextmanager
    def _lock_file(self) -> Iterator[sqlite3.Connection]:
        if self._pid != os.getpid():
            self._forget_parent()
        with self._lock:
            self._appended = []
            try:
                if self._written != self._get_state():  # by somebody else
                    self._disturbed = True
                    self.close()  # its page cache may be stale
                connection = self._open()
                begin_transaction(connection, self.path)
                self._check_identity()
                yield connection
                connection.execute("COMMIT")
                self._written = self._get_state()
            except BaseException as error:
                self.close()
                if isinstance(error, sqlite3.Error | UnicodeDecodeError):
                    raise explain_error(self.path, error) from error
                raise
            for entry in self._appended:
                self._known.add_entry(*entry)

    def _read_entries(self, connection: sqlite3.Connection) -> History:
        """Return the history of all entries, after verifying the new ones.

        If somebody else has written to the file, verify all entries.
        """
        # Entries seen earlier must still be there: this detects a file rolled back.
        known = self._known
        read = History(0, self._genesis) if self._disturbed else known
        rows = connection.execute(
            "SELECT e.id, time, run, kind, p.plan, steps, hash FROM entries e "
            "LEFT JOIN plans p ON p.id = e.plan WHERE e.id > ? ORDER BY e.id",
            (read.count,),
        )
        for number, time, run, kind, text, steps, digest in rows:
            try:
                expected = hash_entry(read.head, [number, time, run, kind, text, steps])
            except TypeError:
                expected = b""
            if number != read.count + 1 or digest != expected:
                raise make_damage_error(self.path, "an entry was changed")
            plan = self._parse_entry(number, kind, text, steps)
            read.add_entry(kind, run, plan, steps, digest)
            if read.count == known.count and read.head != known.head:
                raise make_damage_error(self.path, "an entry was changed")
        newest = connection.execute("SELECT count, head FROM ledger").fetchall()
        if newest != [(read.count, read.head)] or read.count < known.count:
            raise make_damage_error(self.path, "an entry is missing")
        self._known, self._disturbed = read, False
        return read

    def _parse_entry(
        self, number: int, kind: str, text: str, steps: int
    ) -> PrivacyPlan:
        """Return the plan of an entry; refuse the ledger if it has no valid one."""
        try:
            if not check_steps(steps):
                raise ValueError("steps=0 must be at least 1")
            if kind not in get_args(Kind):
                raise ValueError(f"kind={kind!r} is unknown")
            return convert_to_unit(parse_plan(text), self.unit)
        except (TypeError, ValueError) as error:
            raise LedgerError(
                f"the ledger {self.path} has an entry, number {number}, that cannot be "
                f"accounted for: {error}; install the version that wrote it, or stop "
                "using these data"
            ) from error

    def _forget_parent(self) -> None:
        if self._connection is not None:
            _inherited.append(self._connection)
        self._connection = None
        self._pid, self._lock = os.getpid(), threading.RLock()

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = open_database(self.path)
            self._inode = self._inode or self.path.stat().st_ino
        return self._connection

    def _get_state(self) -> tuple[int, int]:
        """Return the file's modification time and size; every write changes them."""
        about = self.path.stat() if self.path.exists() else None
        return (about.st_mtime_ns, about.st_size) if about else (0, 0)

    def _check_identity(self) -> None:
        # Charges written to a file that was removed or replaced would be lost.
        if not self.path.exists() or self.path.stat().st_ino != self._inode:
            raise LedgerError(
                f"the ledger {self.path} was removed or replaced while in use; put it "
                "back, or start again if the change was meant"
            )


def get_time() -> str:
    """Return the time as ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def hash_limits(max_epsilon: float, delta: float, unit: str) -> bytes:
    """Return the hash that the first entry continues: of the limits and the unit."""
    return hash_entry(b"", [max_epsilon, delta, unit])


def hash_entry(before: bytes, row: Sequence[object]) -> bytes:
    """Return the hash of an entry, which continues that of the entry before it."""
    return hashlib.sha256(before + json.dumps(row).encode()).digest()
