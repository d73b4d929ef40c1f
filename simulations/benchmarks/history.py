"""What benchmarks cost from version to version: ``history.jsonl``, a line for each run.

A line has the version, the commit, the date, the machine and the costs; only lines of
the same machine are compared.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from simulations.benchmarks.outcome import Table
from simulations.results.machine import machine

PATH = Path(__file__).with_name("history.jsonl")
# Costs differ by so much from run to run.
NOISE = 1.15

Costs = Mapping[str, Mapping[str, float]]  # benchmark, figure


@dataclass(frozen=True)
class Entry:
    """One run of all benchmarks.

    Attributes
    ----------
    version, commit, date : str
    machine : str
        Processor and cores.
    load : float
        Of the machine, when the run ended.
    costs : mapping
        By benchmark and figure; less is better.
    """

    version: str
    commit: str
    date: str
    machine: str
    load: float
    costs: Costs


def entry(costs: Costs) -> Entry:
    """Return what is to be kept of a run that ends now."""
    here = machine()
    return Entry(
        version=metadata.version("flwr-safedshb"),
        commit=_commit(),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        machine=f"{here['processor']}, {here['cores']} cores",
        load=float(str(here["load"])),
        costs=costs,
    )


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    found = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=PATH.parent
    )
    return found.stdout.strip() or "unknown"


def append(new: Entry, path: Path = PATH) -> None:
    """Add a line."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(new)) + "\n")


def last(machine: str, path: Path = PATH) -> Entry | None:
    """Return the last entry of a machine, if there is one."""
    if not path.exists():
        return None
    entries = [Entry(**json.loads(line)) for line in path.read_text().splitlines()]
    return next((e for e in reversed(entries) if e.machine == machine), None)


def comparison(before: Entry | None, now: Entry) -> Table | None:
    """Return what has changed since an entry, or None if there is none."""
    if before is None:
        return None
    rows = [
        (f"{benchmark}: {figure}", f"{old:.3g}", f"{cost:.3g}", verdict(cost / old))
        for benchmark, costs in now.costs.items()
        for figure, cost in costs.items()
        if (old := before.costs.get(benchmark, {}).get(figure))
    ]
    return Table(
        f"Against the last record of this machine: {before.version} "
        f"({before.commit}), {before.date}",
        ("figure", "then", "now", ""),
        rows,
        f"Less is better. Changes below {NOISE:.2f} times are noise.",
    )


def verdict(ratio: float) -> str:
    """Say how a cost has changed."""
    if ratio > NOISE:
        return f"{ratio:.2f} times slower"
    return f"{1 / ratio:.2f} times faster" if ratio < 1 / NOISE else "same"
