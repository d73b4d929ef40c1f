"""Many independent calls, on processes of one thread each, with the time left."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TypeVar

from joblib import (  # type: ignore[import-untyped]
    Parallel,
    delayed,
    parallel_config,
)
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

T = TypeVar("T")
# How often a process looks whether its parent is there.
_LOOK_SECONDS = 0.5


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
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    count = workers or os.cpu_count() or 1
    with (
        # Small sums on two threads only wait for each other. One worker is a process of
        # its own, too, which joblib has for two or more: the figures are the same.
        parallel_config("loky", n_jobs=max(2, count), inner_max_num_threads=1),
        # The speed of many: two end at once, then none for long.
        Progress(*columns, console=console, speed_estimate_period=120) as display,
    ):
        pool = Parallel(
            return_as="generator_unordered", batch_size=1, pre_dispatch=count
        )
        found = pool(delayed(_timed)(os.getpid(), call, task) for task in tasks)
        yield from display.track(found, total=len(tasks), description=words)


def _timed(
    parent: int, call: Callable[..., T], task: tuple[object, ...]
) -> tuple[T, float]:
    _end_with(parent)
    start = time.process_time()
    result = call(*task)
    return result, time.process_time() - start


@cache
def _end_with(parent: int) -> None:
    """End this process when its parent has: the pool's own would wait for long."""

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
