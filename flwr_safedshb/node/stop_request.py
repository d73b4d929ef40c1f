"""Note that a node is asked to stop, and end it even if it hangs."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Seconds in which a node may end by itself.
_PATIENCE_SECONDS = 6.0


class StopRequest:
    """SIGINT and SIGTERM as a flag, also for `select`.

    A handler that raises is lost wherever the interrupted code catches exceptions, as
    code that retries does. This one raises nothing. It makes the flag readable, and
    calls `end_now` after 6 s if the context was not left by then.

    Parameters
    ----------
    end_now : callable
        Ends the process, whatever it is doing.
    patience : float
        Seconds until then.
    """

    def __init__(
        self, end_now: Callable[[], object], patience: float = _PATIENCE_SECONDS
    ) -> None:
        self._timer = threading.Timer(patience, end_now)
        self._timer.daemon = True
        self._readable, self._writable = os.pipe()
        self.is_set = False

    def __enter__(self) -> Self:
        self._before = {each: signal.signal(each, self._note) for each in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._timer.cancel()
        os.close(self._readable)
        os.close(self._writable)

    def fileno(self) -> int:
        """Return the file descriptor that is readable once the flag is set."""
        return self._readable

    def wait(self, seconds: float) -> None:
        """Wait for so long, or until the flag is set."""
        select.select([self], [], [], seconds)

    def _note(self, _: int, __: FrameType | None) -> None:
        if not self.is_set:
            self.is_set = True
            os.write(self._writable, b"s")
            self._timer.start()
