"""The paper's experiments again: ``python -m simulations.reproduce``.

Allouah et al., ICML 2023: three privacy regimes, four attacks, Safe-DSHB with SMEA and
with Filter, and DP-DSGD without adversaries, five seeds: 135 runs. Sixty more run
Filter's listing to its end. A run that is already there, with the same configuration,
is not run again, so a reproduction that was killed goes on where it was.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from simulations import results
from simulations.results import RunRecord

REGIMES = ("low", "moderate", "high")
ATTACKS = ("alie", "foe", "sign-flip", "label-flip")
RULES = ("smea", "filter", "filter-literal")
BENCHMARK = "dp-dsgd"
SEEDS = (1, 2, 3, 4, 5)
TITLE = "Safe-DSHB: the paper's experiments, reproduced"


@dataclass(frozen=True)
class Case:
    """One run of the reproduction; `attack` is None for DP-DSGD."""

    regime: str
    method: str
    attack: str | None
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's file, without suffix."""
        parts = (self.regime, self.method, self.attack, f"seed{self.seed}")
        return "_".join(part for part in parts if part)

    @property
    def overrides(self) -> list[str]:
        """What makes the run of the packaged configuration."""
        where = [f"privacy={self.regime}", f"seed={self.seed}"]
        if self.attack is None:
            return [f"experiment={BENCHMARK}", *where]
        attacked = [f"aggregation={self.method}", f"attack={self.attack}"]
        return ["experiment=paper", *attacked, *where]


def cases(
    regimes: Sequence[str] = REGIMES, seeds: Sequence[int] = SEEDS
) -> Iterator[Case]:
    """Yield all runs; the paper's come before those that it does not have."""
    rules = [[*RULES[:2]], [*RULES[2:]]]
    for group in rules:
        for regime in regimes:
            for seed in seeds:
                if group is rules[0]:
                    yield Case(regime, BENCHMARK, None, seed)
                for attack in ATTACKS:
                    for rule in group:
                        yield Case(regime, rule, attack, seed)


@dataclass(frozen=True)
class Reproduction:
    """Runs in a folder.

    Attributes
    ----------
    folder : Path
        Holds ``runs/``, one JSON file each.
    cases : tuple of Case
    overrides : tuple of str
        For all runs, such as ``data.path=...`` or ``steps=20``.
    """

    folder: Path
    cases: tuple[Case, ...]
    overrides: tuple[str, ...] = ()

    def path(self, case: Case) -> Path:
        """Return the file of a run."""
        return self.folder / "runs" / f"{case.name}.json"

    def found(self, case: Case) -> RunRecord | None:
        """Return a run that is there and has the configuration that is asked for."""
        run = results.read(self.path(case))
        if run is None or run["config"] != results.resolved(self._overrides(case)):
            return None
        return run

    def run(self, case: Case) -> None:
        """Run one case in this process and write its file."""
        from simulations.app import share
        from simulations.engines import run

        overrides = self._overrides(case)
        start = time.perf_counter()
        progress = run(overrides)
        seconds = time.perf_counter() - start
        results.write(self.path(case), results.record(overrides, progress, seconds))
        # Each share holds on to its data, and the next run has others.
        share.cache_clear()

    def missing(self) -> list[Case]:
        """Return the runs that are still to do."""
        return [case for case in self.cases if self.found(case) is None]

    def _overrides(self, case: Case) -> list[str]:
        return [*case.overrides, *self.overrides]


def run_all(
    work: Reproduction, todo: Sequence[Case], workers: int, done: Callable[[Case], None]
) -> dict[Case, str]:
    """Run cases on processes of one thread each; return what failed, and why.

    Parameters
    ----------
    work : Reproduction
    todo : sequence of Case
    workers : int
    done : callable
        Called after every run, in this process.
    """
    failed: dict[Case, str] = {}
    # Spawned and not forked: torch's threads do not survive a fork.
    pool = ProcessPoolExecutor(
        max_workers=workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
    )
    with _one_thread(), pool:
        futures: dict[Future[str | None], Case] = {
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


def _attempt(work: Reproduction, case: Case) -> str | None:
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


def show_progress(
    console: Console, work: Reproduction, todo: Sequence[Case], workers: int
) -> dict[Case, str]:
    """Run with a live display of what is done and the time left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    # The speed of many runs, not of the last few: two end at once, then none for long.
    with Progress(*columns, console=console, speed_estimate_period=120) as display:
        task = display.add_task("runs", total=len(todo))

        def done(case: Case) -> None:
            display.update(task, advance=1, description=case.name)

        return run_all(work, todo, workers, done)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("outputs/reproduce"))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=REGIMES)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument(
        "--quick", action="store_true", help="one seed and 20 steps, to see it work"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], help="Hydra overrides of all runs: data.path=.."
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, then draw and tabulate all of it."""
    args = arguments(argv)
    console = Console()
    seeds = args.seeds[:1] if args.quick else args.seeds
    more = (*(["steps=20"] if args.quick else []), *args.set)
    work = Reproduction(args.output, tuple(cases(args.regimes, seeds)), more)
    todo = work.missing()
    console.print(
        f"{len(work.cases)} runs, {len(work.cases) - len(todo)} of them are there"
    )
    start = time.perf_counter()
    failed = show_progress(console, work, todo, args.workers) if todo else {}
    console.print(f"{len(todo)} runs took {time.perf_counter() - start:.0f} s")
    for case, error in failed.items():
        console.print(f"{case.name} failed: {error}", style="bold red")
    if failed:
        return 1
    conclude(console, work)
    return 0


def conclude(console: Console, work: Reproduction) -> None:
    """Draw and tabulate all runs."""
    from simulations import summary
    from simulations.report import sweep_page

    # Checked or written by now: to compose every configuration again takes long.
    found = {case: results.read(work.path(case)) for case in work.cases}
    runs = {case: run for case, run in found.items() if run is not None}
    summary.draw(runs, work.folder / "figures")
    summary.write(runs, work.folder)
    text = summary.markdown(runs)
    panels = summary.by_panel(runs)
    (work.folder / "report.html").write_text(sweep_page(TITLE, panels, text))
    console.print(Markdown(text))
    console.print(f"Figures, tables and runs are in {work.folder}")


if __name__ == "__main__":
    raise SystemExit(main())
