"""What durability costs a client's step: its ledger, and its momentum on disk.

The bare step loads the model, draws, clips, adds noise and updates a momentum in
memory; the deployed one also charges the ledger and keeps the momentum.
"""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from flwr.app import Context, RecordDict

from flwr_safedshb.algorithm.model_arrays import load_weights
from flwr_safedshb.algorithm.momentum_store import MomentumFiles, MomentumState
from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.privacy.private_gradient import private_vector
from simulations.benchmarks.measure import median_in_turns, peak_megabytes
from simulations.benchmarks.steps import make_mlp_task

BETA = 0.9


def measure_step(hidden: int, enough: float, folder: str = "") -> dict[str, float]:
    """Return seconds of both steps, in turns, and MB of the deployed one's peak.

    Parameters
    ----------
    hidden : int
        Units in each of the model's two hidden layers.
    enough : float
        Seconds.
    folder : str
        Of the ledger; by default one in the working directory, so on its disk.
    """
    if not folder:
        with tempfile.TemporaryDirectory(prefix="safedshb-", dir=".") as scratch:
            return measure_step(hidden, enough, scratch)
    task = make_mlp_task(hidden)
    model = task.make()
    config: dict[str, bool | float | int | str] = {
        "state-dir": str(Path(folder) / "state"),
        "max-epsilon": 1e6,
        "delta": 1e-5,
    }
    context = Context(1, 1, config, RecordDict(), {})
    client = SafeDSHBClient(
        model, task.loss, task.make_data(), task.make_plan(), context
    )
    source = client.source
    theta = [p.detach().numpy().copy() for p in model.parameters()]
    size = sum(array.size for array in theta)
    numbers, momentum = itertools.count(), np.zeros(size, np.float32)

    def bare() -> None:
        load_weights(source.trained, theta)
        gradient = private_vector(source.gradients, source.draw(0))
        np.multiply(momentum, BETA, out=momentum)
        np.multiply(gradient, 1.0 - BETA, out=gradient)
        np.add(momentum, gradient, out=momentum)

    def deployed() -> None:
        client.fit(theta, {"step": next(numbers), "momentum": BETA, "session": "run"})

    for step in (bare, deployed):
        step()  # loads what is loaded late
    seconds = median_in_turns({"bare": bare, "deployed": deployed}, enough, most=200)
    peak = peak_megabytes(deployed)
    return {**seconds, "peak": peak, "model": 4 * size / 2**20}


def momentum_survives_kill(size: int, place: str = ".") -> bool:
    """Kill a process that writes momentums; return whether a whole one is there."""
    call = f"from {__name__} import write_momentums as write; import sys; "
    command = [sys.executable, "-c", call + "write(int(sys.argv[1]), sys.argv[2])"]
    with tempfile.TemporaryDirectory(prefix="safedshb-", dir=place) as folder:
        command += [str(size), folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        kept = MomentumFiles(Path(folder)).load("run", 10**9, size)
    return line == "kept\n" and bool((kept.momentum == 0.5).all())


def write_momentums(size: int, folder: str) -> None:
    """Write momentums until killed, and say so after the first."""
    momentum = np.full(size, 0.5, np.float32)
    for step in itertools.count():
        MomentumFiles(Path(folder)).save("run", MomentumState(step, momentum, step - 1))
        if step == 0:
            print("kept", flush=True)
