"""What a node's log says of examples that cannot be used, and how much of it."""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from flwr_safedshb.stop_signal import reraise_stop

_logger = logging.getLogger(__name__)
_shown: ContextVar[bool] = ContextVar("shown", default=False)
_silent: ContextVar[bool] = ContextVar("silent", default=False)
# Characters of an error's text.
_LONG = 300


def log_unusable(count: int, error: BaseException) -> None:
    """Write to this node's log that examples count as zero, and why.

    The text of an error may quote the data: it is there for those who look closer, and
    where causes are shown.
    """
    if _silent.get():
        return
    what = type(error).__name__
    if _shown.get():
        what += f": {' '.join(str(error).split())[:_LONG]}"
    _logger.warning("%d examples cannot be used and count as zero: %s", count, what)
    _logger.debug("Why they cannot be used", exc_info=error)


class TimePadding:
    """Keep a loop over examples from ending sooner because some of them fail.

    How long a node takes is seen by the server. An example that raises stops early, so
    its share of the time is waited for at the end.

    Parameters
    ----------
    usual : float
        Seconds of an example, as made-up ones took; until an example has not failed.
    """

    def __init__(self, usual: float = 0.0) -> None:
        self._usual = usual
        self._taken: list[float] = []
        self._failed: list[float] = []

    @contextmanager
    def example(self) -> Iterator[None]:
        """Run what an example takes; log what it raises, and go on."""
        start = time.perf_counter()
        try:
            yield
        except BaseException as error:
            reraise_stop(error)
            log_unusable(1, error)
            self._failed.append(time.perf_counter() - start)
        else:
            self._taken.append(time.perf_counter() - start)

    def wait(self) -> None:
        """Wait for the time that failed examples would have taken."""
        usual = statistics.median(self._taken) if self._taken else self._usual
        missing = sum(max(0.0, usual - taken) for taken in self._failed)
        if missing:
            time.sleep(missing)


@contextmanager
def log_causes(shown: bool = True) -> Iterator[None]:
    """Let logs have the texts of errors, which may quote the data.

    For the data's owner, and for simulations: their noise comes from a seed, and
    protects nobody.
    """
    before = _shown.set(shown or _shown.get())
    try:
        yield
    finally:
        _shown.reset(before)


@contextmanager
def ignore_failure() -> Iterator[None]:
    """Ignore what made-up examples raise, and log nothing of it."""
    with silence_log():
        try:
            yield
        except BaseException as error:
            reraise_stop(error)


@contextmanager
def silence_log() -> Iterator[None]:
    """Log nothing about examples: they are made up to fail."""
    before = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(before)


@contextmanager
def ignore_warnings() -> Iterator[None]:
    """Keep warnings back, which may quote the data, and come as often as these say."""
    with warnings.catch_warnings(action="ignore"):
        yield
