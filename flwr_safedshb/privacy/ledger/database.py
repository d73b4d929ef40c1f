"""Create, open and lock the SQLite file of a ledger, and explain its errors.

A rollback journal and ``synchronous=EXTRA`` were chosen over the faster write-ahead
log, because then the file alone is the whole ledger whenever nobody is writing: a copy
or a move of it cannot leave charges behind.
"""

from __future__ import annotations

import logging
import os
import random
import sqlite3
import tempfile
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

from flwr_safedshb.atomic_io import sync_folder

# Pragmas that identify a ledger file; application_id is "SDHB" in ASCII.
MARKS = {"application_id": 0x53444842, "user_version": 2, "journal_mode": "delete"}
_SCHEMA = """
CREATE TABLE ledger (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    max_epsilon REAL NOT NULL, delta REAL NOT NULL, unit TEXT NOT NULL,
    count INTEGER NOT NULL, head BLOB NOT NULL
);
CREATE TABLE plans (id INTEGER PRIMARY KEY, plan TEXT NOT NULL UNIQUE);
CREATE TABLE entries (
    id INTEGER PRIMARY KEY, time TEXT NOT NULL, run TEXT NOT NULL, kind TEXT NOT NULL,
    plan INTEGER NOT NULL REFERENCES plans (id), steps INTEGER NOT NULL,
    hash BLOB NOT NULL
);
CREATE TRIGGER entries_stay BEFORE DELETE ON entries
BEGIN SELECT RAISE(ABORT, 'entries are append-only'); END;
CREATE TRIGGER entries_keep BEFORE UPDATE ON entries
BEGIN SELECT RAISE(ABORT, 'entries are append-only'); END;
"""
_WAIT_SECONDS = 120.0


class LedgerError(RuntimeError):
    """The ledger cannot be used now; nothing may be released without it."""


class LedgerCorrupted(LedgerError):  # noqa: N818  # what happened, as in BudgetExhausted
    """The file is not a ledger, or not the one that was written."""


def create_database(
    path: Path, max_epsilon: float, delta: float, unit: str, head: bytes
) -> None:
    """Create an empty ledger at ``path`` atomically.

    ``head`` is the hash before the first entry. If another process has created the
    ledger meanwhile, this one changes nothing.
    """
    path = Path(os.path.realpath(path))
    if Path(f"{path}-journal").exists():
        reason = "its journal is there and the file itself is missing"
        raise make_damage_error(path, reason)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise LedgerError(
            f"cannot create the ledger {path}: {error.strerror}; its directory must "
            "exist and be writable"
        ) from error
    os.close(handle)  # mkstemp made it readable by its owner only
    try:
        connection = _connect(Path(name))
        with connection:
            connection.executescript(
                f"PRAGMA application_id = {MARKS['application_id']};"
                f"PRAGMA user_version = {MARKS['user_version']}; BEGIN; {_SCHEMA}"
            )
            connection.execute(
                "INSERT INTO ledger VALUES (1, ?, ?, ?, 0, ?)",
                (max_epsilon, delta, unit, head),
            )
        connection.close()
        with suppress(FileExistsError):
            os.link(name, path)  # unlike a rename, never replaces a ledger
            logging.getLogger(__name__).warning(
                "new privacy ledger %s: earlier releases of these data are not in it",
                path,
            )
    except sqlite3.Error as error:
        raise explain_error(path, error) from error
    finally:
        os.unlink(name)
    sync_folder(path.parent)


def open_database(path: Path) -> sqlite3.Connection:
    """Open an existing ledger file."""
    # By name only: closing a file drops all locks that the process has on it.
    if not path.is_file():
        raise LedgerError(f"there is no ledger {path}; it was removed, or never made")
    if path.stat().st_size == 0:
        raise make_damage_error(path, "it is empty")
    return _connect(path)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA synchronous = EXTRA")
    connection.execute("PRAGMA fullfsync = ON")  # macOS: past the disk's own cache
    connection.execute("PRAGMA trusted_schema = OFF")
    return connection


def begin_transaction(connection: sqlite3.Connection, path: Path) -> None:
    """Wait until no other process reads or writes the file, and check its format."""
    deadline = monotonic() + _WAIT_SECONDS
    # SQLite's own busy handler backs off to ten tries a second, and so hardly ever
    # finds the gap between two charges of a busy process.
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
    # From here on only readers are in the way.
    connection.execute(f"PRAGMA busy_timeout = {_WAIT_SECONDS * 1000:.0f}")
    for pragma, expected in MARKS.items():
        (found,) = connection.execute(f"PRAGMA {pragma}").fetchone()
        if found == expected:
            continue
        if pragma == "user_version":
            raise LedgerError(
                f"the ledger {path} has format {found}, and this version reads and "
                f"writes format {expected} only; go on with the version that wrote it, "
                "or make a new ledger for data that no run has seen"
            )
        raise make_damage_error(path, f"its {pragma} is {found}, not {expected}")


def make_damage_error(path: Path, reason: str) -> LedgerCorrupted:
    """Return the error for a file that cannot be trusted."""
    return LedgerCorrupted(
        f"the ledger {path} is refused: {reason}. What was spent is no longer certain: "
        "restore the newest intact copy, or give up the budget it stood for"
    )


_DAMAGE = ("", "SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR", "SQLITE_CONSTRAINT")
_REMEDIES = {
    "SQLITE_BUSY": "another process holds it; nothing was charged, try again",
    "SQLITE_FULL": "release nothing, free space on its disk and try again",
    "SQLITE_IOERR": "release nothing, check its disk and the space on it, try again",
    "SQLITE_READONLY": "check the permissions of the file and of its directory",
    "SQLITE_CANTOPEN": "check the permissions of the file and of its directory",
}


def explain_error(path: Path, error: sqlite3.Error | UnicodeDecodeError) -> LedgerError:
    """Return a LedgerError for SQLite's error, with the remedy."""
    # Extended names have one more word: SQLITE_IOERR_WRITE.
    name = "_".join(getattr(error, "sqlite_errorname", "").split("_")[:2])
    if name in _DAMAGE:
        return make_damage_error(path, str(error))
    remedy = _REMEDIES.get(name, "release nothing")
    return LedgerError(f"the ledger {path} cannot be used ({error}): {remedy}")
