"""Many independent calls, each on a process of one thread, with the time left.

The processes are of this machine, or of a Ray cluster that is there.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

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

from simulations.config import SettingsError

T = TypeVar("T")
# How often a process looks whether its parent is there.
_LOOK_SECONDS = 0.5


def run_in_processes(
    call: Callable[..., T],
    tasks: Sequence[tuple[object, ...]],
    workers: int | None,
    words: str,
    console: Console,
    cluster: str | None = None,
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
        Processes here; by default as many as cores.
    words : str
        What the display says.
    console : Console
    cluster : str, optional
        Address of a Ray cluster, ``host:port`` of its head, whose processors do the
        work; each of its machines has this package and the data at the same paths.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    if cluster is None:
        found = _here(call, tasks, workers or os.cpu_count() or 1)
    else:
        found = _there(call, tasks, cluster)
    # The speed of many: two end at once, then none for long.
    with Progress(*columns, console=console, speed_estimate_period=120) as display:
        yield from display.track(found, total=len(tasks), description=words)


def _here(
    call: Callable[..., T], tasks: Sequence[tuple[object, ...]], count: int
) -> Iterator[tuple[T, float]]:
    # Small sums on two threads only wait for each other. One worker is a process of its
    # own, too, which joblib has for two or more: the figures are the same.
    with parallel_config("loky", n_jobs=max(2, count), inner_max_num_threads=1):
        pool = Parallel(
            return_as="generator_unordered", batch_size=1, pre_dispatch=count
        )
        yield from pool(delayed(_timed)(os.getpid(), call, task) for task in tasks)


def _there(
    call: Callable[..., T], tasks: Sequence[tuple[object, ...]], cluster: str
) -> Iterator[tuple[T, float]]:
    """Yield as the cluster's processors return, one thread each.

    Ray's backend for joblib returns all results at the end, so a sweep that is killed
    would lose them; Ray itself returns each as it comes.
    """
    _reach(cluster)
    import ray

    ray.init(cluster, log_to_driver=False, logging_level=logging.ERROR)
    try:
        remote: Any = ray.remote(_timed)
        waiting = [remote.remote(None, call, task) for task in tasks]
        while waiting:
            (done,), waiting = ray.wait(waiting)
            yield ray.get(done)
    finally:
        ray.shutdown()


def _reach(cluster: str) -> None:
    """Refuse an address where nobody listens, for which Ray would wait for minutes."""
    host, _, port = cluster.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"--cluster {cluster}: there is no Ray cluster ({error}); give host:port "
            "of its head, which `ray start --head` prints"
        ) from None


def _timed(
    parent: int | None, call: Callable[..., T], task: tuple[object, ...]
) -> tuple[T, float]:
    if parent is not None:
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
