"""What a SuperNode says while it works: passed on, and a hint that there is work.

A SuperNode has no way to tell that a message has come but to be asked, and to be asked
again and again costs it more than the message. It does say so in its log. Should the
words change one day, messages are found by asking, two seconds later.
"""

from __future__ import annotations

import os
import re
import select
import sys
import time
from typing import IO

# Said once a message is there with everything that belongs to it.
_RECEIVED = b"Received successfully"
# Seconds between two questions: when a message has come, and otherwise.
_SOON, _LATER = 0.02, 2.0
# How long a message that was spoken of is looked for.
_HOPE_SECONDS = 2.0
# What a terminal would obey, but for colours and ends of lines: Flower logs names that
# a server has chosen as they are. Also in the two bytes that UTF-8 has for it.
_OBEYED = re.compile(
    rb"\x1b(?!\[[0-9;]{0,9}m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]|\xc2[\x80-\x9f]"
)


def _escaped(found: re.Match[bytes]) -> bytes:
    return b"".join(b"\\x%02x" % byte for byte in found[0])


class Voice:
    """The output of a SuperNode.

    Parameters
    ----------
    stream : binary file
        The end of a pipe that can be read.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._heard = b""
        self._hope = self._next = 0.0
        self.over = False

    def fileno(self) -> int:
        """Return the number by which to wait for words."""
        return self._stream.fileno()

    def hear(self) -> None:
        """Take in what was said, and pass it on."""
        words = os.read(self.fileno(), 2**16)
        self.over = not words
        sys.stderr.buffer.write(_OBEYED.sub(_escaped, words))
        sys.stderr.flush()
        heard = self._heard + words
        if _RECEIVED in heard:
            self._next = time.monotonic()
            self._hope = self._next + _HOPE_SECONDS
            heard = heard.rpartition(_RECEIVED)[2]
        # The next words may be in the middle of a line.
        self._heard = heard[-len(_RECEIVED) :]

    def asked(self, found: bool) -> None:
        """Take note that the SuperNode was asked for a task, and if there was one."""
        now = time.monotonic()
        if found:
            self._hope = 0.0
        self._next = now + (_SOON if now < self._hope else _LATER)

    def pause(self) -> float:
        """Return how long to wait before the SuperNode is asked for a task again."""
        return max(self._next - time.monotonic(), 0.0)

    def finish(self) -> None:
        """Pass on what is left to hear, and wait for nothing."""
        while not self.over and select.select([self], [], [], 0.0)[0]:
            self.hear()
