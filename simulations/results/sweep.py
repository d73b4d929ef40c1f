"""Many runs, each once: in a folder, on several processes, with a live display.

The processes are of this machine or of a Ray cluster. They return what came of a run,
and the files are written here, so they are the same wherever a run was done.

A run that is already there, with the same configuration, data and versions, is not run
again, so a sweep that was killed goes on where it was. Any other run that is found
under its name is replaced.
"""

from __future__ import annotations

import logging
import shlex
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from rich.console import Console

from simulations.command import Parser, alone_at, at_least
from simulations.config import SettingsError, keys
from simulations.results import record
from simulations.results.parallel import in_processes
from simulations.results.publish import check_page
from simulations.results.schema import RunRecord


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
        """Refuse settings of any run before the first one starts.

        Of runs that differ in their seed alone the first is looked at: each is checked
        once more when it starts, and to compose hundreds of them takes a minute.
        """
        from simulations.check import check

        more = keys(shlex.join(self.overrides))
        alike = {_seedless(case.overrides): case for case in reversed(self.cases)}
        for case in reversed(alike.values()):
            own = set(keys(shlex.join(case.overrides)))
            if taken := own.intersection(more):
                raise SettingsError(
                    f"--set {min(taken)}: the runs are named after their own; leave it "
                    "out, or see --help"
                )
            check(shlex.join(self.overrides_of(case)))

    def run(self, case: C) -> RunRecord:
        """Run one case in this process."""
        from simulations.engines import run
        from simulations.experiment import forget_shares

        overrides = self.overrides_of(case)
        start = time.perf_counter()
        progress = run(overrides)
        found = record.record(overrides, progress, time.perf_counter() - start)
        # Each share holds on to its data, and the next run has others.
        forget_shares()
        return found

    def keep(self, case: C, run: RunRecord) -> None:
        """Write the file of a run."""
        record.write(self.path(case), run)

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


def _seedless(overrides: Sequence[str]) -> tuple[str, ...]:
    return tuple(one for one in overrides if not one.startswith("seed="))


def run_all(
    work: Sweep[C],
    todo: Sequence[C],
    workers: int | None,
    console: Console,
    cluster: str | None = None,
) -> dict[C, str]:
    """Run cases on several processes; return what failed, and why."""
    tasks = [(i, work, case) for i, case in enumerate(todo)]
    failed = {}
    found = in_processes(_attempt, tasks, workers, "runs", console, cluster)
    for (i, run), _ in found:
        if isinstance(run, str):
            failed[todo[i]] = run
        else:
            work.keep(todo[i], run)
    return failed


def complete(
    console: Console,
    work: Sweep[C],
    workers: int | None,
    again: bool = False,
    cluster: str | None = None,
) -> bool:
    """Run what is missing, or all of it `again`; return whether all went well."""
    todo = list(work.cases) if again else work.missing()
    there = len(work.cases) - len(todo)
    console.print(f"{len(work.cases)} runs, {there} of them are there")
    if not todo:
        return True
    start = time.perf_counter()
    failed = run_all(work, todo, workers, console, cluster)
    console.print(f"{len(todo)} runs took {time.perf_counter() - start:.0f} s")
    for case, error in failed.items():
        console.print(f"{case.name} failed: {error}", style="bold red")
    return not failed


def sweep_parser(
    description: str, output: str, seeds: Sequence[int], page: bool = True
) -> Parser:
    """Return a parser with the arguments that every sweep has."""
    parser = Parser(description=description)
    parser.add_argument("--output", type=Path, default=Path(output))
    parser.add_argument("--workers", type=at_least(1), help="processes; all cores")
    parser.add_argument(
        "--cluster", metavar="ADDRESS", help="of a Ray cluster that does the runs"
    )
    parser.add_argument("--seeds", nargs="+", type=at_least(0), default=seeds)
    parser.add_argument(
        "--set", nargs="+", default=[], help="Hydra overrides of all runs: steps=.."
    )
    if page:
        parser.add_argument(
            "--page", type=Path, help="also put tables and figures into this page"
        )
    return parser


def conduct(
    args: Namespace,
    cases: Iterable[C],
    conclude: Callable[[Console, dict[C, RunRecord]], None],
    page: str = "",
    again: bool = False,
) -> int:
    """Check all runs, run what is missing, and conclude; return the exit code.

    Parameters
    ----------
    args : Namespace
        Of a `sweep_parser`.
    cases : iterable of cases
    conclude : callable of the console and all runs
    page : str
        Name of the marks in ``args.page``.
    again : bool
        Run also what is there.
    """
    work = Sweep(args.output, tuple(dict.fromkeys(cases)), tuple(args.set))
    if page and args.page is not None:
        check_page(args.page, page)
    work.check()
    console = Console()
    with alone_at(args.output / "runs"):
        if not complete(console, work, args.workers, again, args.cluster):
            return 1
        conclude(console, work.runs())
    return 0


def _attempt(number: int, work: Sweep[C], case: C) -> tuple[int, RunRecord | str]:
    """Run a case; return why it failed, as text, for not every exception travels."""
    import flwr  # noqa: F401  # its logger must be there before it is set

    logging.getLogger("flwr").setLevel(logging.ERROR)
    try:
        return number, work.run(case)
    except Exception as error:
        return number, f"{type(error).__name__}: {error}"
