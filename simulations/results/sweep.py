"""Many runs, each once: in a folder, on several processes, with a live display.

A run that is already there, with the same configuration, data and versions, is not run
again, so a sweep that was killed goes on where it was. Any other run that is found
under its name is replaced.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from simulations.command import at_least
from simulations.config import SettingsError, keys
from simulations.results import record
from simulations.results.record import RunRecord


class SweepCase(Protocol):
    """One run of a sweep; equal ones are the same run."""

    @property
    def name(self) -> str:
        """Name of the run's file, without suffix."""
        ...

    @property
    def overrides(self) -> list[str]:
        """What makes the run of the packaged configuration."""
        ...


C = TypeVar("C", bound=SweepCase)


@dataclass(frozen=True)
class Sweep(Generic[C]):
    """Runs in a folder.

    Attributes
    ----------
    folder : Path
        Holds ``runs/``, one JSON file each.
    cases : tuple of cases
    overrides : tuple of str
        For all runs, such as ``data.path=...`` or ``steps=20``.
    """

    folder: Path
    cases: tuple[C, ...]
    overrides: tuple[str, ...] = ()

    def path(self, case: C) -> Path:
        """Return the file of a run."""
        return self.folder / "runs" / f"{case.name}.json"

    def found(self, case: C) -> RunRecord | None:
        """Return a run that is there and is the one that is asked for."""
        run = record.read(self.path(case))
        return run if run and record.same(run, self.overrides_of(case)) else None

    def check(self) -> None:
        """Refuse settings of any run before the first one starts."""
        from simulations.check import check

        more = keys(shlex.join(self.overrides))
        for case in self.cases:
            own = set(keys(shlex.join(case.overrides)))
            if taken := own.intersection(more):
                raise SettingsError(
                    f"--set {min(taken)}: the runs are named after their own; leave it "
                    "out, or see --help"
                )
            check(shlex.join(self.overrides_of(case)))

    def run(self, case: C) -> None:
        """Run one case in this process and write its file."""
        from simulations.engines import run
        from simulations.experiment import share

        overrides = self.overrides_of(case)
        start = time.perf_counter()
        progress = run(overrides)
        seconds = time.perf_counter() - start
        record.write(self.path(case), record.record(overrides, progress, seconds))
        # Each share holds on to its data, and the next run has others.
        share.cache_clear()

    def missing(self) -> list[C]:
        """Return the runs that are still to do."""
        return [case for case in self.cases if self.found(case) is None]

    def runs(self) -> dict[C, RunRecord]:
        """Return the runs there are.

        They were checked or written by now: to compose every configuration again takes
        long.
        """
        found = {case: record.read(self.path(case)) for case in self.cases}
        return {case: run for case, run in found.items() if run is not None}

    def overrides_of(self, case: C) -> list[str]:
        """Return everything that makes a run of the packaged configuration."""
        return ["engine=batched", *case.overrides, *self.overrides]


def run_all(
    work: Sweep[C], todo: Sequence[C], workers: int, done: Callable[[C], None]
) -> dict[C, str]:
    """Run cases on processes of one thread each; return what failed, and why.

    Parameters
    ----------
    work : Sweep
    todo : sequence of cases
    workers : int
    done : callable
        Called after every run, in this process.
    """
    failed: dict[C, str] = {}
    # Spawned and not forked: torch's threads do not survive a fork.
    pool = ProcessPoolExecutor(
        max_workers=workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
    )
    with _one_thread(), pool:
        futures: dict[Future[str | None], C] = {
            pool.submit(_attempt, work, case): case for case in todo
        }
        try:
            for future in as_completed(futures):
                error = future.result()
                if error is not None:
                    failed[futures[future]] = error
                done(futures[future])
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return failed


def show_progress(
    console: Console, work: Sweep[C], todo: Sequence[C], workers: int
) -> bool:
    """Run with a live display of what is done and the time left.

    Returns
    -------
    bool
        Whether all went well; what did not is printed.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    start = time.perf_counter()
    # The speed of many runs, not of the last few: two end at once, then none for long.
    with Progress(*columns, console=console, speed_estimate_period=120) as display:
        task = display.add_task("runs", total=len(todo))

        def done(case: C) -> None:
            display.update(task, advance=1, description=case.name)

        failed = run_all(work, todo, workers, done)
    console.print(f"{len(todo)} runs took {time.perf_counter() - start:.0f} s")
    for case, error in failed.items():
        console.print(f"{case.name} failed: {error}", style="bold red")
    return not failed


def complete(console: Console, work: Sweep[C], workers: int) -> bool:
    """Run what is missing; return whether everything is there then."""
    todo = work.missing()
    there = len(work.cases) - len(todo)
    console.print(f"{len(work.cases)} runs, {there} of them are there")
    return show_progress(console, work, todo, workers) if todo else True


def add_arguments(
    parser: argparse.ArgumentParser, output: str, seeds: Sequence[int]
) -> None:
    """Add the arguments that every sweep has."""
    parser.add_argument("--output", type=Path, default=Path(output))
    parser.add_argument("--workers", type=at_least(1), default=os.cpu_count() or 1)
    parser.add_argument("--seeds", nargs="+", type=at_least(0), default=seeds)
    parser.add_argument(
        "--set", nargs="+", default=[], help="Hydra overrides of all runs: steps=.."
    )


def _attempt(work: Sweep[C], case: C) -> str | None:
    """Run a case; return why it failed, as text, for not every exception travels."""
    try:
        work.run(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


class _one_thread:  # noqa: N801  # read as a statement: with _one_thread()
    """Let the processes started inside have one thread each: small sums only wait."""

    _NAMES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

    def __enter__(self) -> None:
        self._before = {name: os.environ.get(name) for name in self._NAMES}
        os.environ.update(dict.fromkeys(self._NAMES, "1"))

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _begin() -> None:
    import flwr  # noqa: F401  # its logger must be there before it is set

    logging.getLogger("flwr").setLevel(logging.ERROR)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent has: the pool's own would wait forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
