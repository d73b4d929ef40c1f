"""Many independent calls, on processes of one thread each, with a display."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from joblib import (  # type: ignore[import-untyped]
    Parallel,
    delayed,
    parallel_config,
)
from rich.console import Console
from rich.progress import track

T = TypeVar("T")


def in_processes(
    call: Callable[..., T],
    tasks: Sequence[tuple[object, ...]],
    workers: int | None,
    words: str,
    console: Console,
) -> Iterator[tuple[T, float]]:
    """Yield what a call returns for each tuple of arguments, in any order.

    Each comes with the processor's seconds that it took: on a shared machine the wall
    clock says little.

    Parameters
    ----------
    call : callable
        Of a module that a new process can import.
    tasks : sequence of tuple
        Give long ones first, so that none is left alone at the end.
    workers : int, optional
        Processes; by default as many as cores.
    words : str
        What the display says.
    console : Console
    """
    count = workers or os.cpu_count() or 1
    # Small sums on two threads only wait for each other.
    with parallel_config("loky", n_jobs=count, inner_max_num_threads=1):
        pool = Parallel(return_as="generator_unordered", batch_size=1)
        found = pool(delayed(_timed)(call, task) for task in tasks)
        yield from track(found, words, total=len(tasks), console=console)


def _timed(call: Callable[..., T], task: tuple[object, ...]) -> tuple[T, float]:
    start = time.process_time()
    result = call(*task)
    return result, time.process_time() - start
