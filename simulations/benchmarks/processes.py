"""What must be measured in a process of its own.

``python -m simulations.benchmarks.processes TASK [NUMBER ...]`` prints a list as
JSON; `ask` runs it and reads that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import TypedDict

import numpy as np

from flwr_safedshb.aggregation import SMEA
from simulations.benchmarks.cells import Cell, rule_for, warm_up
from simulations.benchmarks.families import family
from simulations.benchmarks.measure import in_turns, reset_peak, resident


def ask(task: str, *numbers: int, **environment: str) -> list[float]:
    """Run a task in a new process with one thread and return its figures."""
    command = [sys.executable, "-m", "simulations.benchmarks.processes", task]
    command += map(str, numbers)
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | threads | environment,
    )
    figures: list[float] = json.loads(done.stdout)
    return figures


def first_calls() -> tuple[float, float]:
    """Return the seconds of a process's first search: to compile, and from the cache.

    An empty directory takes the place of the compiler's cache, so that there is
    something to compile.
    """
    with tempfile.TemporaryDirectory() as cache:
        (cold,) = ask("first-call", NUMBA_CACHE_DIR=cache)
        (warm,) = ask("first-call", NUMBA_CACHE_DIR=cache)
    return cold, warm


# Seconds of one call; "with" is no name that a class could give to a field.
CompilerTimes = TypedDict("CompilerTimes", {"with": float, "without": float})


def compiler_times(cells: Sequence[Cell]) -> dict[Cell, CompilerTimes]:
    """Return the seconds of `isotropic_seconds` with and without a compiler."""
    numbers = [number for cell in cells for number in cell]
    fast = ask("isotropic", *numbers)
    slow = ask("isotropic", *numbers, NUMBA_DISABLE_JIT="1")
    return {
        cell: {"with": compiled, "without": interpreted}
        for cell, compiled, interpreted in zip(cells, fast, slow, strict=True)
    }


def isotropic_seconds(cells: Sequence[Cell]) -> list[float]:
    """Return the median seconds of a call on the first isotropic input of each cell."""
    warm_up()
    medians = []
    for n, f, d in cells:
        call = partial(rule_for(n), family("isotropic", n, f, d, seed=0), f)
        medians.append(median(in_turns({"SMEA": call}, 0.5, 15)["SMEA"]))
    return medians


def extra_memory(n: int, d: int) -> float:
    """Return the peak beyond the replies while aggregating, in models of d float32.

    Every reply has four layers and memory of its own, as messages have.
    """
    rng = np.random.default_rng(0)
    quarter = d // 4
    replies = [
        [rng.standard_normal(quarter, dtype=np.float32) for _ in range(4)]
        for _ in range(n)
    ]
    warm_up()
    before = resident("VmRSS")
    reset_peak()
    SMEA()(replies, n // 5)
    return 1024.0 * (resident("VmHWM") - before) / (4.0 * 4 * quarter)


if __name__ == "__main__":
    task, numbers = sys.argv[1], [int(number) for number in sys.argv[2:]]
    match task:
        case "first-call":
            figures = [warm_up()]
        case "isotropic":
            figures = isotropic_seconds(list(zip(*[iter(numbers)] * 3, strict=True)))
        case "memory":
            figures = [extra_memory(*numbers)]
        case _:
            sys.exit(f"task={task!r} must be first-call, isotropic or memory")
    print(json.dumps(figures))
