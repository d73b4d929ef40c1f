"""What every benchmark needs: a clock, and the memory of a process.

Machines are shared and noisy, so what is compared is timed in turns and by the time of
the processor (`in_turns`): where others wait for it too, a clock on the wall makes long
calls look longer than short ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds that a call took, and what it returned."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def worked(call: Callable[[], T]) -> tuple[float, T]:
    """Return the processor's seconds in this thread, and what the call returned.

    For calls that start no other thread; on an idle machine the same as `timed`.
    """
    start = time.thread_time()
    result = call()
    return time.thread_time() - start, result


def in_turns(
    calls: Mapping[str, Callable[[], object]], enough: float, most: int
) -> dict[str, list[float]]:
    """Time calls that start no thread one after the other, again and again.

    Parameters
    ----------
    calls : mapping of name to callable
    enough : float
        Seconds on the wall after which no new turn begins.
    most : int
        Largest number of turns.

    Returns
    -------
    dict of name to the processor's seconds of each turn
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    for turn in range(most):
        if turn and time.perf_counter() - start > enough:
            break
        for name, call in calls.items():
            seconds[name].append(worked(call)[0])
    return seconds


def resident(key: str) -> int:
    """Return a figure of this process in kB: VmRSS is resident, VmHWM its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {key}; this benchmark needs Linux")


def reset_peak() -> None:
    """Let the peak of the resident set start again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def figures_alone(module: str, *words: str) -> dict[str, float]:
    """Run a module in a new process with one thread and return its figures."""
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures
