"""What a node's log says of examples that cannot be used, and how much of it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_logger = logging.getLogger(__name__)
_shown: ContextVar[bool] = ContextVar("shown", default=False)
# Characters of an error's text.
_LONG = 300


def log_unusable(count: int, error: Exception) -> None:
    """Write to this node's log that examples count as zero, and why.

    The text of an error may quote the data: it is there for those who look closer, and
    where causes are shown.
    """
    what = type(error).__name__
    if _shown.get():
        what += f": {' '.join(str(error).split())[:_LONG]}"
    _logger.warning("%d examples cannot be used and count as zero: %s", count, what)
    _logger.debug("Why they cannot be used", exc_info=error)


@contextmanager
def causes_shown(shown: bool = True) -> Iterator[None]:
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
def unwarned() -> Iterator[None]:
    """Keep warnings back, which may quote the data, and come as often as these say."""
    with warnings.catch_warnings(action="ignore"):
        yield
