"""What durability costs a client's step: its ledger, and its momentum on disk.

Part of ``python -m simulations.benchmarks.client_step``. The bare step loads the model,
draws, clips, adds noise and updates a momentum in memory; the deployed one also charges
the ledger and keeps the momentum. ``... deployed step HIDDEN SECONDS`` and ``...
deployed kept SIZE`` measure in a process of their own and print JSON.
"""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypedDict

import numpy as np
import torch
from flwr.app import Context, RecordDict

from flwr_safedshb.algorithm.model_arrays import load_weights
from flwr_safedshb.algorithm.momentum_store import MomentumFiles, MomentumState
from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.privacy.private_gradient import private_vector
from simulations.benchmarks.measure import figures_alone, in_turns, reset_peak, resident
from simulations.benchmarks.outcome import Check, Table, at_most
from simulations.benchmarks.steps import Task
from simulations.models import MLP

# Units in each of two hidden layers: 1.8 and 12.8 million parameters.
MODELS = {"MLP": 1000, "large MLP": 3200}
SIZE = 200_000_000
BETA = 0.9


class Cost(TypedDict):
    """Seconds of the two steps, MB of the deployed one's peak and of its model."""

    bare: float
    deployed: float
    peak: float
    model: float


ask = partial(figures_alone, "simulations.benchmarks.deployed")


def task(hidden: int) -> Task:
    """Return a model with two hidden layers and its examples."""
    loss = torch.nn.CrossEntropyLoss()
    return Task(lambda: MLP(784, 10, (hidden, hidden)), loss, (784,), 10, 1000, 64)


def step_cost(hidden: int, enough: float, folder: Path) -> Cost:
    """Measure both steps in turns, and the memory of the deployed one."""
    job = task(hidden)
    model = job.make()
    config: dict[str, bool | float | int | str] = {
        "state-dir": str(folder / "state"),
        "max-epsilon": 1e6,
        "delta": 1e-5,
    }
    context = Context(1, 1, config, RecordDict(), {})
    client = SafeDSHBClient(model, job.loss, job.data(), job.plan(), context)
    source = client.source
    theta = [p.detach().numpy().copy() for p in model.parameters()]
    size = sum(array.size for array in theta)
    numbers, momentum = itertools.count(), np.zeros(size, np.float32)

    def bare() -> None:
        load_weights(source.trained, theta)
        found = private_vector(source.gradients, source.draw(0))
        np.multiply(momentum, BETA, out=momentum)
        np.multiply(found, 1.0 - BETA, out=found)
        np.add(momentum, found, out=momentum)

    def deployed() -> None:
        client.fit(theta, {"step": next(numbers), "momentum": BETA, "session": "run"})

    for step in (bare, deployed):
        step()  # loads what is loaded late
    turns = in_turns({"bare": bare, "deployed": deployed}, enough, most=200)
    before = resident("VmRSS")
    reset_peak()
    deployed()
    peak = resident("VmHWM") - before
    return Cost(
        bare=median(turns["bare"]),
        deployed=median(turns["deployed"]),
        peak=peak / 1024,
        model=4 * size / 2**20,
    )


def found_after_kill(size: int, folder: Path) -> bool:
    """Kill a process that writes momentums, and say whether a whole one is there."""
    command = [
        sys.executable,
        "-m",
        "simulations.benchmarks.deployed",
        "write",
        str(size),
        str(folder),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    kept = MomentumFiles(folder).load("run", 10**9, size)
    return told == "kept\n" and bool((kept.momentum == 0.5).all())


def write_for_ever(size: int, folder: Path) -> None:
    """Write momentums, and say so after the first."""
    momentum = np.full(size, 0.5, np.float32)
    for step in itertools.count():
        MomentumFiles(folder).save("run", MomentumState(step, momentum, step - 1))
        if step == 0:
            print("kept", flush=True)


def measure(quick: bool) -> dict[str, dict[str, float]]:
    """Return the figures of every model, and of a momentum that outlives a kill."""
    models = {"MLP": MODELS["MLP"]} if quick else MODELS
    enough = "1.0" if quick else "15.0"
    figures = {name: ask("step", str(h), enough) for name, h in models.items()}
    return figures | {"kept": ask("kept", str(10**6 if quick else SIZE))}


def table(figures: Mapping[str, Mapping[str, float]]) -> Table:
    """Show what durability costs."""
    rows = [
        (
            name,
            f"{1e3 * mine['bare']:.1f}",
            f"{mine['deployed'] / mine['bare']:.2f}",
            f"{mine['peak'] / mine['model']:.1f}",
        )
        for name, mine in figures.items()
        if "bare" in mine
    ]
    return Table(
        "A deployed step, with its ledger and its momentum on disk",
        ("model", "bare ms", "/ bare", "memory, models"),
        rows,
        "bare: the same step with neither. One thread, the processor's time; memory: "
        "the peak beyond model and data.",
    )


def checks(figures: Mapping[str, Mapping[str, float]]) -> list[Check]:
    """Compare with the targets; small models pay for the ledger's disk."""
    name, mine = [item for item in figures.items() if "bare" in item[1]][-1]
    kept = figures["kept"]
    return [
        at_most(
            f"{name}, deployed", mine["deployed"] / mine["bare"], 1.5, "bare steps"
        ),
        at_most(
            f"{name}, memory deployed", mine["peak"] / mine["model"], 5.0, "models"
        ),
        Check(
            "momentum after kill -9",
            "found" if kept["found"] else "lost",
            "found",
            bool(kept["found"]),
            f"{kept['size']:.0f} parameters",
        ),
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="safedshb-", dir=".") as scratch:
        match sys.argv[1:]:
            case ["step", hidden, enough]:
                print(json.dumps(step_cost(int(hidden), float(enough), Path(scratch))))
            case ["kept", size]:
                found = found_after_kill(int(size), Path(scratch))
                print(json.dumps({"found": float(found), "size": float(size)}))
            case ["write", size, folder]:
                write_for_ever(int(size), Path(folder))
            case _:
                sys.exit(f"{sys.argv[1:]}: say step HIDDEN SECONDS, or kept SIZE")
