"""What benchmarks cost from version to version: ``history.jsonl``, a line a run.

Only lines of the same machine are compared.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from simulations.benchmarks.result import ResultTable
from simulations.results.machine import machine

PATH = Path(__file__).with_name("history.jsonl")
# Costs differ by so much from run to run.
NOISE = 1.15

Costs = Mapping[str, Mapping[str, float]]  # benchmark, figure


@dataclass(frozen=True)
class Entry:
    """One run of all benchmarks: where, under which load, and its costs."""

    version: str
    commit: str
    date: str
    machine: str
    load: float
    costs: Costs


def make_entry(costs: Costs) -> Entry:
    """Return what is to be kept of a run that ends now."""
    here = machine()
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    described = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=PATH.parent
    )
    return Entry(
        version=metadata.version("flwr-safedshb"),
        commit=described.stdout.strip() or "unknown",
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        machine=f"{here['processor']}, {here['cores']} cores",
        load=float(str(here["load"])),
        costs=costs,
    )


def append_entry(entry: Entry) -> None:
    """Add a line."""
    with PATH.open("a") as file:
        file.write(json.dumps(asdict(entry)) + "\n")


def load_last(machine: str) -> Entry | None:
    """Return the last entry of a machine, if there is one."""
    lines = PATH.read_text().splitlines() if PATH.exists() else []
    entries = [Entry(**json.loads(line)) for line in reversed(lines)]
    return next((entry for entry in entries if entry.machine == machine), None)


def compare_entries(before: Entry | None, now: Entry) -> ResultTable | None:
    """Return what has changed since an entry, or None if there is none."""
    if before is None:
        return None
    rows = [
        (f"{benchmark}: {name}", f"{old:.3g}", f"{cost:.3g}", _describe(cost / old))
        for benchmark, costs in now.costs.items()
        for name, cost in costs.items()
        if (old := before.costs.get(benchmark, {}).get(name))
    ]
    return ResultTable(
        f"Against the last record of this machine: {before.version} "
        f"({before.commit}), {before.date}",
        ("figure", "then", "now", "change"),
        rows,
        f"Less is better. Changes below {NOISE:.2f} times are noise.",
    )


def _describe(ratio: float) -> str:
    if ratio > NOISE:
        return f"{ratio:.2f} times slower"
    return f"{1 / ratio:.2f} times faster" if ratio < 1 / NOISE else "same"
