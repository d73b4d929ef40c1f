"""Read a ledger from a copy, without touching its file or its journal."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from flwr_safedshb.privacy.ledger.database import LedgerError, explain_error
from flwr_safedshb.privacy.ledger.ledger import Ledger


@contextmanager
def open_snapshot(path: Path) -> Iterator[Ledger]:
    """Open a consistent copy of the ledger at `path`; it is removed afterwards.

    Raises
    ------
    LedgerError
        If there is no ledger, or it is damaged.
    """
    with (
        tempfile.TemporaryDirectory(prefix="safedshb-") as folder,
        open_copy(path, Path(folder) / path.name) as ledger,
    ):
        yield ledger


def open_copy(path: Path, copy: Path) -> Ledger:
    """Copy the ledger at `path` to `copy`, and open the copy."""
    if not path.is_file():
        raise LedgerError(f"there is no ledger {path}")
    _copy_database(path, copy)
    try:
        return Ledger(copy)
    except LedgerError as error:
        text = str(error).replace(os.path.realpath(copy), str(path))
        raise type(error)(text) from error


def _copy_database(path: Path, copy: Path) -> None:
    """Copy the committed transactions of a database, also while others write."""
    uri = f"{path.absolute().as_uri()}?mode=ro"
    try:
        with (
            closing(sqlite3.connect(uri, uri=True, timeout=120)) as source,
            closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorname", "") != "SQLITE_READONLY_ROLLBACK":
            raise explain_error(path, error) from error
        # A writer died inside a transaction. Opening the copy rolls it back there; the
        # next charge rolls it back in the file itself.
        shutil.copyfile(path, copy)
        journal = path.with_name(f"{path.name}-journal")
        shutil.copyfile(journal, copy.with_name(journal.name))
