"""Tail the log of a SuperNode: pass it on, and poll for a task when it has one.

A SuperNode does not tell that a message has come, and to poll it again and again costs
it more than the message. But it logs "Received". Should the words change one day,
messages are found by polling, two seconds later.
"""

from __future__ import annotations

import os
import re
import select
import sys
import time
from typing import IO

# Logged once a message is there with all its objects.
_RECEIVED = b"Received successfully"
# Seconds between two polls: after that line, and otherwise.
_FAST_POLL, _SLOW_POLL = 0.02, 2.0
# Seconds of fast polling after that line.
_EXPECT_SECONDS = 2.0
# What a terminal would obey, but for colours and ends of lines: Flower logs names that
# a server has chosen as they are. Also in the two bytes that UTF-8 has for it.
_CONTROLS = re.compile(
    rb"\x1b(?!\[[0-9;]{0,9}m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]|\xc2[\x80-\x9f]"
)


class LogTail:
    """The output of a SuperNode, from the readable end of a pipe."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._tail = b""
        self._expect_until = self._next_poll = 0.0
        self.is_closed = False

    def fileno(self) -> int:
        """Return the file descriptor, for `select`."""
        return self._stream.fileno()

    def read(self) -> None:
        """Read some output and pass it on."""
        output = os.read(self.fileno(), 2**16)
        self.is_closed = not output
        sys.stderr.buffer.write(_CONTROLS.sub(_escape, output))
        sys.stderr.flush()
        tail = self._tail + output
        if _RECEIVED in tail:
            self._next_poll = time.monotonic()
            self._expect_until = self._next_poll + _EXPECT_SECONDS
            tail = tail.rpartition(_RECEIVED)[2]
        # What comes next may be the rest of a line.
        self._tail = tail[-len(_RECEIVED) :]

    def note_poll(self, found: bool) -> None:
        """Note that the SuperNode was polled, and whether there was a task."""
        now = time.monotonic()
        if found:
            self._expect_until = 0.0
        is_expected = now < self._expect_until
        self._next_poll = now + (_FAST_POLL if is_expected else _SLOW_POLL)

    def poll_delay(self) -> float:
        """Return the seconds until the SuperNode is to be polled again."""
        return max(self._next_poll - time.monotonic(), 0.0)

    def read_rest(self) -> None:
        """Pass on what is left to read, and wait for nothing."""
        while not self.is_closed and select.select([self], [], [], 0.0)[0]:
            self.read()


def _escape(match: re.Match[bytes]) -> bytes:
    return b"".join(b"\\x%02x" % byte for byte in match[0])
