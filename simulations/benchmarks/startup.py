"""Time until a client's process is ready: ``python -m simulations.benchmarks.startup``.

New processes that import torch alone (the lower bound), torch and Flower, and what a
client needs; and one that also makes a client and takes its first step. In turns, by
the processor's time of the whole process.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from statistics import median

from simulations.benchmarks.plots import Panel
from simulations.benchmarks.result import (
    Measurement,
    Result,
    ResultTable,
    run_benchmark,
)

TORCH, READY = "torch", "client ready"
FIRST_STEP = """
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
    TORCH: "import torch",
    "torch and Flower": "import torch, flwr.app, flwr.clientapp",
    READY: "from flwr_safedshb import SafeDSHBClient, client_app",
    "client's first step": FIRST_STEP,
}
TURNS = 5


def processor_seconds(script: str) -> float:
    """Return the seconds that a new process needs for a script, start included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", script], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(quick: bool) -> Result:
    """Measure every script in turns, after one that fills the caches."""
    if not quick:
        processor_seconds(FIRST_STEP)
    turns = [
        {name: processor_seconds(script) for name, script in SCRIPTS.items()}
        for _ in range(1 if quick else TURNS)
    ]
    seconds = {name: median(turn[name] for turn in turns) for name in SCRIPTS}
    ratio = seconds[READY] / seconds[TORCH]
    rows = [(name, value, value / seconds[TORCH]) for name, value in seconds.items()]
    return Result(
        tables=[ResultTable("A new process", ("what it does", "s", "/ torch"), rows)],
        figures={READY: Measurement(ratio)},
        costs={f"{READY} / {TORCH}": ratio},
        raw=turns,
        panels=[
            Panel("A new process", "", "processor s", {"": seconds}, kind="bars"),
        ],
    )


if __name__ == "__main__":
    raise SystemExit(run_benchmark("startup"))
