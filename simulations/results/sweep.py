"""The runs of a study: each once, in a folder, on several processes, as files.

The processes are of this machine or of a Ray cluster. They return what a run left, and
the files are written here, so they are the same wherever a run was done. A run that is
there with the same settings, data and versions is not run again; any other run that is
found under its name is replaced.
"""

from __future__ import annotations

import csv
import inspect
import io
import json
import logging
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import numpy as np
from omegaconf import OmegaConf
from rich.console import Console

from flwr_safedshb.atomic_io import replace_file
from simulations.config import SettingsError, list_keys
from simulations.results.machine import versions
from simulations.results.parallel import run_in_processes
from simulations.results.schema import RunRecord
from simulations.results.statistics import late

if TYPE_CHECKING:
    from simulations.study import Case

R = TypeVar("R")
# So many runs that failed are told with their reasons.
MAX_FAILURES = 10


class Measurement(Protocol[R]):
    """What a run does with its overrides, and the file it leaves."""

    def check(self, overrides: Sequence[str]) -> None:
        """Refuse settings before any run starts."""

    def run(self, overrides: Sequence[str]) -> R:
        """Do one run."""

    def read(self, path: Path, overrides: Sequence[str] | None) -> R | None:
        """Return the run in a file, if it is what the overrides would give today."""

    def write(self, path: Path, found: R) -> None:
        """Write a run, whole or not at all."""

    def metrics(self, found: R) -> Mapping[str, object]:
        """Return the columns of a run in ``results.csv``."""


class Training:
    """A run trains a federation."""

    def check(self, overrides: Sequence[str]) -> None:
        """Refuse settings that make no run."""
        from simulations.check import check

        check(shlex.join(_with_engine(overrides)))

    def run(self, overrides: Sequence[str]) -> RunRecord:
        """Train in this process."""
        from simulations.engines import run
        from simulations.experiment import forget_shares
        from simulations.results import record

        # The logger must be there before it is set.
        import flwr  # noqa: F401  # isort: skip

        logging.getLogger("flwr").setLevel(logging.ERROR)
        start, chosen = time.perf_counter(), _with_engine(overrides)
        found = record.record(chosen, run(chosen), time.perf_counter() - start)
        # Each share holds on to its data, and the next run has others.
        forget_shares()
        return found

    def read(self, path: Path, overrides: Sequence[str] | None) -> RunRecord | None:
        """Return the run in a file, if it is what the overrides would give today."""
        from simulations.results import record

        found = record.read(path)
        if found is None or overrides is None:
            return found
        return found if record.same(found, _with_engine(overrides)) else None

    def write(self, path: Path, found: RunRecord) -> None:
        """Write a run, whole or not at all."""
        from simulations.results import record

        record.write(path, found)

    def metrics(self, found: RunRecord) -> Mapping[str, object]:
        """Return accuracies, losses and epsilon."""
        losses = found["evaluations"]["training_loss"]
        return {
            "accuracy": found["returned"]["accuracy"],
            "test_loss": found["returned"]["test_loss"],
            "last_accuracy": found["evaluations"]["accuracy"][-1],
            "first_training_loss": losses[0],
            "last_training_loss": losses[-1],
            "late_training_loss": float(late([found], "training_loss")[0]),
            "epsilon": found["privacy"]["epsilon"],
            "delta": found["privacy"]["delta"],
            "seconds": round(found["seconds"], 2),
            "version": found["versions"].get("flwr-safedshb", ""),
            "overrides": " ".join(found["overrides"]),
        }


@dataclass(frozen=True)
class Function:
    """A run calls a function with its settings, which returns numbers by name."""

    function: Callable[..., Mapping[str, object]]

    def check(self, overrides: Sequence[str]) -> None:
        """Refuse settings that are no arguments of the function."""
        try:
            inspect.signature(self.function).bind(**self._arguments(overrides))
        except TypeError as error:
            raise SettingsError(f"{' '.join(overrides)}: {error}") from error

    def run(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Call the function."""
        start = time.perf_counter()
        found = dict(self.function(**self._arguments(overrides)))
        return {
            "overrides": list(overrides),
            "versions": versions(),
            "seconds": time.perf_counter() - start,
            "metrics": found,
        }

    def read(
        self, path: Path, overrides: Sequence[str] | None
    ) -> dict[str, Any] | None:
        """Return the run in a file, if it is what the overrides would give today."""
        try:
            found = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            return None
        now = {
            "overrides": overrides and list(overrides),
            "versions": versions(),
        }
        if not isinstance(found, dict) or "metrics" not in found:
            return None
        if overrides is not None and any(found[key] != now[key] for key in now):
            return None
        return found

    def write(self, path: Path, found: dict[str, Any]) -> None:
        """Write a run, whole or not at all."""
        text = json.dumps(found) + "\n"
        replace_file(path, lambda file: file.write(text.encode()))

    def metrics(self, found: dict[str, Any]) -> Mapping[str, object]:
        """Return what the function returned, except for lists."""
        plain = {k: v for k, v in found["metrics"].items() if not isinstance(v, list)}
        return {
            **plain,
            "seconds": round(found["seconds"], 2),
            "version": found["versions"]["flwr-safedshb"],
        }

    def _arguments(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Return ``key=value`` words as arguments, numbers as numbers."""
        words = OmegaConf.from_dotlist(list(overrides))
        found = cast(dict[str, Any], OmegaConf.to_container(words))
        if "seed" not in inspect.signature(self.function).parameters:
            del found["seed"]
        return found


def _with_engine(overrides: Sequence[str]) -> list[str]:
    return ["engine=batched", *overrides]


@dataclass(frozen=True)
class Sweep(Generic[R]):
    """Runs in a folder, which holds ``runs/`` with one JSON file each.

    Attributes
    ----------
    folder : Path
    cases : sequence of Case
    measurement : Measurement
    overrides : tuple of str
        For all runs, such as ``data.path=...`` or ``steps=20``.
    """

    folder: Path
    cases: Sequence[Case]
    measurement: Measurement[R]
    overrides: tuple[str, ...] = ()

    def path(self, case: Case) -> Path:
        """Return the file of a run."""
        return self.folder / "runs" / f"{case.name}.json"

    def overrides_of(self, case: Case) -> list[str]:
        """Return everything that makes a run."""
        return [*case.overrides, f"seed={case.seed}", *self.overrides]

    def check(self) -> None:
        """Refuse settings of any run before the first one starts.

        Of runs that differ in their seed alone the first is looked at: each is checked
        once more when it starts, and to compose hundreds of them takes a minute.
        """
        more = set(list_keys(shlex.join(self.overrides)))
        names: dict[str, Case] = {}
        checked: set[tuple[str, ...]] = set()
        for case in self.cases:
            if names.setdefault(case.name, case) != case:
                raise SettingsError(f"two runs of the study are named {case.name}")
            own = {*list_keys(shlex.join(case.overrides)), "seed"}
            if taken := own & more:
                raise SettingsError(
                    f"--set {min(taken)}: the runs are named after their own; leave it "
                    "out, or see --help"
                )
            if case.overrides not in checked:
                checked.add(case.overrides)
                self.measurement.check(self.overrides_of(case))

    def missing(self) -> list[Case]:
        """Return the runs that are still to do."""
        return [
            case
            for case in self.cases
            if self.measurement.read(self.path(case), self.overrides_of(case)) is None
        ]

    def runs(self) -> dict[Case, R]:
        """Return the runs there are.

        They were checked or written by now: to compose every configuration again takes
        long.
        """
        found = {
            case: self.measurement.read(self.path(case), None) for case in self.cases
        }
        return {case: run for case, run in found.items() if run is not None}


def run_missing(
    console: Console,
    work: Sweep[R],
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
    start, failed = time.perf_counter(), []
    tasks = [(i, work.measurement, work.overrides_of(c)) for i, c in enumerate(todo)]
    found = run_in_processes(_attempt, tasks, workers, "runs", console, cluster)
    for (i, run), _ in found:
        if isinstance(run, str):
            failed.append(f"{todo[i].name} failed: {run}")
        else:
            work.measurement.write(work.path(todo[i]), run)
    console.print(f"{len(todo)} runs took {time.perf_counter() - start:.0f} s")
    for line in failed[:MAX_FAILURES]:
        console.print(line, style="bold red")
    if more := failed[MAX_FAILURES:]:
        console.print(f"and {len(more)} more failed", style="bold red")
    return not failed


def _attempt(
    number: int, measurement: Measurement[R], overrides: Sequence[str]
) -> tuple[int, R | str]:
    """Do a run; return why it failed, as text, for not every exception travels."""
    try:
        return number, measurement.run(overrides)
    except Exception as error:
        return number, f"{type(error).__name__}: {error}"


def write_csv(path: Path, runs: Mapping[Case, R], measurement: Measurement[R]) -> None:
    """Write a row for each run: labels, seed, what was measured, version."""
    rows = [
        {**case.labels, "seed": case.seed, **measurement.metrics(run)}
        for case, run in runs.items()
    ]
    heads = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, heads, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: _plain(v) for k, v in row.items()} for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda file: file.write(text.getvalue().encode()))


def _plain(value: object) -> object:
    return f"{value:.10g}" if isinstance(value, float | np.floating) else value
