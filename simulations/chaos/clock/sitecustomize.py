"""A wrong clock for every Python process that finds this directory in its path.

The wall clock is wrong by CHAOS_CLOCK seconds; the monotonic one, that waiting depends
on, stays right. (libfaketime shifts more, and hangs the waiting of Python's threads.)
"""

from __future__ import annotations

import datetime
import os
import time
from datetime import datetime as _real_datetime

_SECONDS = int(os.environ["CHAOS_CLOCK"])
_real_time, _real_time_ns = time.time, time.time_ns


class _Any(type):
    """Every datetime counts as one, also those made by the real class."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _real_datetime)


class _Shifted(_real_datetime, metaclass=_Any):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _Shifted:
        """Return the wrong time."""
        return super().now(tz) + datetime.timedelta(seconds=_SECONDS)


time.time = lambda: _real_time() + _SECONDS
time.time_ns = lambda: _real_time_ns() + _SECONDS * 10**9
datetime.datetime = _Shifted  # type: ignore[misc]
