"""Examples that cannot be used: what is logged about them, and how long they take."""

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


def describe_cause(error: BaseException, max_text: int = 300) -> str:
    """Return an error's type, and its text where `log_causes` allows it.

    The text may quote the data.
    """
    text = f": {' '.join(str(error).split())[:max_text]}" if _shown.get() else ""
    return type(error).__name__ + text


def log_unusable(count: int, error: BaseException) -> None:
    """Log on this node that examples count as zero, and why."""
    if not _silent.get():
        why = describe_cause(error)
        _logger.warning("%d examples cannot be used and count as zero: %s", count, why)
        _logger.debug("Why they cannot be used", exc_info=error)


class TimePadding:
    """Make a loop over examples take as long as if none of them failed.

    The server sees how long a node takes, and an example that raises ends early. The
    missing time is waited for after the loop.

    Parameters
    ----------
    usual : float
        Seconds of a made-up example; used where all examples fail.
    """

    def __init__(self, usual: float = 0.0) -> None:
        self._usual = usual
        self._taken: list[float] = []
        self._failed: list[float] = []

    @contextmanager
    def time_example(self) -> Iterator[None]:
        """Time the work on one example; log what it raises, and go on."""
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
        """Sleep for the time that failed examples did not take."""
        usual = statistics.median(self._taken) if self._taken else self._usual
        missing = sum(max(0.0, usual - taken) for taken in self._failed)
        if missing:
            time.sleep(missing)


@contextmanager
def log_causes(shown: bool = True) -> Iterator[None]:
    """Allow the texts of errors in logs, which may quote the data.

    For the data's owner, and for simulations, whose seeded noise protects nobody.
    """
    before = _shown.set(shown or _shown.get())
    try:
        yield
    finally:
        _shown.reset(before)


@contextmanager
def ignore_failure() -> Iterator[None]:
    """Ignore what made-up examples raise, without a log line."""
    with silence_log():
        try:
            yield
        except BaseException as error:
            reraise_stop(error)


@contextmanager
def silence_log() -> Iterator[None]:
    """Log nothing about unusable examples, because they are made up to fail."""
    before = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(before)


@contextmanager
def ignore_warnings() -> Iterator[None]:
    """Suppress warnings: their texts and their number may depend on the data."""
    with warnings.catch_warnings(action="ignore"):
        yield
