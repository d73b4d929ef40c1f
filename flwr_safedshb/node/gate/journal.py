"""What the gate must know again once it has been restarted, in one SQLite file.

Nothing waits for the disk: what a killed process has written stays, and whatever takes
the machine down takes the run with it.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import NamedTuple

from flwr_safedshb.node.gate.message_size import MessageSize

_TABLES = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS node (owner TEXT PRIMARY KEY, id TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS question (
    number INTEGER PRIMARY KEY, owner TEXT NOT NULL, id TEXT NOT NULL,
    given BLOB NOT NULL, given_at REAL NOT NULL, max_size TEXT,
    is_answered INTEGER NOT NULL, UNIQUE (owner, id));
CREATE TABLE IF NOT EXISTS reply (
    owner TEXT PRIMARY KEY, session TEXT NOT NULL, push BLOB NOT NULL,
    is_over INTEGER NOT NULL);
"""


class QuestionRow(NamedTuple):
    """A question: the call that gave it, and what has come of it."""

    given: bytes
    given_at: float
    max_size: MessageSize | None
    is_answered: bool


class ReplyRow(NamedTuple):
    """A staged reply: the call that announced it."""

    session: str
    push: bytes
    is_over: bool


class Journal:
    """Nodes by the owner of their key, their questions and their staged replies."""

    def __init__(self, path: Path) -> None:
        self._base = sqlite3.connect(path, isolation_level=None)
        self._base.executescript(_TABLES)

    def find_node(self, owner: str) -> int | None:
        """Return the id of the node with a key, if the SuperLink has accepted it."""
        found = self._base.execute("SELECT id FROM node WHERE owner = ?", [owner])
        row = found.fetchone()
        return None if row is None else int(row[0])

    def save_node(self, owner: str, node_id: int) -> None:
        """Remember a node."""
        words = "INSERT OR REPLACE INTO node VALUES (?, ?)"
        self._base.execute(words, [owner, str(node_id)])  # ids have 64 bits

    def read_questions(self, owner: str) -> list[QuestionRow]:
        """Return the questions of a node in the order in which it was given them."""
        words = (
            "SELECT given, given_at, max_size, is_answered FROM question "
            "WHERE owner = ? ORDER BY number"
        )
        return [
            QuestionRow(given, given_at, _parse_size(size), bool(is_answered))
            for given, given_at, size, is_answered in self._base.execute(words, [owner])
        ]

    def save_question(self, owner: str, message_id: str, row: QuestionRow) -> None:
        """Remember a question, or what has come of it."""
        size = " ".join(map(str, row.max_size)) if row.max_size else None
        self._base.execute(
            "INSERT INTO question (owner, id, given, given_at, max_size, is_answered) "
            "VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (owner, id) DO UPDATE SET "
            "given = excluded.given, max_size = excluded.max_size, "
            "is_answered = excluded.is_answered",
            [owner, message_id, row.given, row.given_at, size, row.is_answered],
        )

    def drop_question(self, owner: str, message_id: str) -> None:
        """Forget a question."""
        words = "DELETE FROM question WHERE owner = ? AND id = ?"
        self._base.execute(words, [owner, message_id])

    def read_reply(self, owner: str) -> ReplyRow | None:
        """Return the reply that a node has staged last."""
        words = "SELECT session, push, is_over FROM reply WHERE owner = ?"
        row = self._base.execute(words, [owner]).fetchone()
        return None if row is None else ReplyRow(row[0], row[1], bool(row[2]))

    def save_reply(self, owner: str, row: ReplyRow) -> None:
        """Remember a staged reply in place of the one before."""
        words = "INSERT OR REPLACE INTO reply VALUES (?, ?, ?, ?)"
        self._base.execute(words, [owner, *row])

    def close(self) -> None:
        """Close the file."""
        self._base.close()


def _parse_size(text: str | None) -> MessageSize | None:
    return MessageSize(*map(int, text.split())) if text else None
