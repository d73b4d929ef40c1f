"""What every benchmark measures with: a clock, the memory of a process, an exponent.

Machines are shared and noisy, so what is compared takes turns and is timed by the
processor: where others wait for it too, a clock on the wall makes long calls look
longer than short ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

_CALL = (
    "import importlib, json, sys; module, name, arguments = sys.argv[1:]; "
    "call = getattr(importlib.import_module(module), name); "
    "print(json.dumps(call(*json.loads(arguments))))"
)


def thread_seconds(call: Callable[[], T]) -> tuple[float, T]:
    """Return the processor's seconds of a call in this thread, and what it returned.

    For calls that start no other thread; on an idle machine the same as a clock.
    """
    start = time.thread_time()
    result = call()
    return time.thread_time() - start, result


def time_in_turns(
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
            seconds[name].append(thread_seconds(call)[0])
    return seconds


def median_in_turns(
    calls: Mapping[str, Callable[[], object]], enough: float, most: int
) -> dict[str, float]:
    """Return the median seconds of calls that take turns; see `time_in_turns`."""
    turns = time_in_turns(calls, enough, most)
    return {name: median(seconds) for name, seconds in turns.items()}


def fit_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return the power of the size with which a cost grows (least squares on logs)."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def resident_kilobytes(key: str = "VmRSS") -> int:
    """Return the resident set of this process in kB, or its peak (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {key}; this benchmark needs Linux")


def peak_megabytes(call: Callable[[], object]) -> float:
    """Return by how much a call raises the resident set at its peak, in MB."""
    before = resident_kilobytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    call()
    return (resident_kilobytes("VmHWM") - before) / 1024


def call_alone(function: Callable[..., T], *arguments: object, **environment: str) -> T:
    """Call a function of a module in a new process with one thread.

    Arguments and result must be JSON; keywords are added to the environment.
    """
    words = (function.__module__, function.__qualname__, json.dumps(arguments))
    done = subprocess.run(
        [sys.executable, "-c", _CALL, *words],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        | environment,
    )
    result: Any = json.loads(done.stdout.splitlines()[-1])
    return result  # type: ignore[no-any-return]  # what the function says
