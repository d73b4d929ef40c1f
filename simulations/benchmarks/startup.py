"""Time until a client's process is ready: ``python -m simulations.benchmarks.startup``.

New processes that import torch alone (the floor), torch and Flower, and what a client
needs; and one that also makes a client and takes its first step. In turns, by the
processor's time of the whole process.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Mapping
from statistics import median

from matplotlib.figure import Figure

from simulations.benchmarks import outcome
from simulations.benchmarks.outcome import Outcome, Table, at_most

FLOOR, READY = "torch", "client ready"
STEP = """
import torch
from flwr.app import Context, RecordDict
from flwr_safedshb import PrivacyPlan, SafeDSHBClient, SeededRandomness, client_app
context = Context(1, 1, {"partition-id": 0}, RecordDict(), {})
data = torch.zeros(50, 68), torch.zeros(50, 1)
model = torch.nn.Linear(68, 1)
client = SafeDSHBClient(
    model, torch.nn.BCEWithLogitsLoss(), data, PrivacyPlan(1.0, 1.0, 25, 50), context,
    randomness=SeededRandomness(0),
)
arrays = [p.detach().numpy() for p in model.parameters()]
client.fit(arrays, {"step": 0, "momentum": 0.9})
"""
SCRIPTS = {
    "Python": "pass",
    "import flwr_safedshb": "import flwr_safedshb",
    FLOOR: "import torch",
    "torch and Flower": "import torch, flwr.app, flwr.clientapp",
    READY: "from flwr_safedshb import SafeDSHBClient, client_app",
    "client's first step": STEP,
}
TURNS = 5


def processor_seconds(script: str) -> float:
    """Return the seconds that a new process needs for a script, start included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", script], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run(quick: bool) -> Outcome:
    """Measure every script in turns, after one that fills the caches."""
    turns = 1 if quick else TURNS
    if not quick:
        processor_seconds(STEP)
    taken: dict[str, list[float]] = {name: [] for name in SCRIPTS}
    for _ in range(turns):
        for name, script in SCRIPTS.items():
            taken[name].append(processor_seconds(script))
    seconds = {name: median(values) for name, values in taken.items()}
    ratio = seconds[READY] / seconds[FLOOR]
    return Outcome(
        name="startup",
        title="Start-up",
        tables=[_table(seconds)],
        checks=[at_most("client ready", ratio, 1.5, "imports of torch")],
        costs={f"{READY} / {FLOOR}": ratio},
        settings={"turns": turns},
        results=taken,
        plot=lambda figure: _plot(figure, seconds),
    )


def _table(seconds: Mapping[str, float]) -> Table:
    rows = [
        (name, f"{value:.2f}", f"{value / seconds[FLOOR]:.2f}")
        for name, value in seconds.items()
    ]
    return Table("A new process", ("what it does", "s", "/ torch"), rows)


def _plot(figure: Figure, seconds: Mapping[str, float]) -> None:
    figure.set_size_inches(7, 2.6)
    axes = figure.subplots()
    axes.barh(list(seconds), list(seconds.values()), color="#0072B2")
    axes.axvline(seconds[FLOOR], color="black", linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of the processor; dashed: torch alone")


if __name__ == "__main__":
    raise SystemExit(outcome.main(run, __doc__))
