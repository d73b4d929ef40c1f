"""Time and memory of one client step: ``python -m simulations.benchmarks.client_step``.

The paths to the clipped sum of per-example gradients, on an MLP 784-1000-1000-10 (1.8
million parameters) and a batch of 64, beside a plain SGD gradient as the floor. Every
case runs in a process of its own, by default with one thread, because threads that wait
for each other on a shared machine blur the figures. Time: the median of the steps after
a warm-up. Memory: the peak of the process's resident set (VmHWM, reset once torch, the
model and the batch are loaded) while it prepares and steps, above what was resident
before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.functional import cross_entropy

from flwr_safedshb.privacy.gradients import ClippedGradients
from simulations.benchmarks.measure import record, reset_peak, resident, timed

CASES = {
    "plain": "plain SGD gradient",
    "per-example": "per-example, whole",
    "chunked": "per-example, chunks",
    "ghost": "ghost",
    "closed": "closed form",
}
Step = Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]


class OwnForward(nn.Module):
    """Hides a chain of layers, for which there is a closed form."""

    def __init__(self, chain: nn.Module) -> None:
        super().__init__()
        self.chain = chain

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Pass examples through the chain."""
        outputs: torch.Tensor = self.chain(inputs)
        return outputs


class Figures(TypedDict):
    """What one process measured."""

    seconds: float
    megabytes: float


def make_step(case: str, model: nn.Module, batch_size: int) -> Step:
    """Return the function whose call is one step."""
    match case:
        case "plain":
            parameters = list(model.parameters())

            def plain(
                inputs: torch.Tensor, targets: torch.Tensor
            ) -> list[torch.Tensor]:
                loss = cross_entropy(model(inputs), targets)
                return list(torch.autograd.grad(loss, parameters))

            return plain
        case "per-example":
            model, loss = OwnForward(model), nn.CrossEntropyLoss()
            return ClippedGradients(model, loss, 1.0, max_examples=batch_size)
        case "chunked":
            return ClippedGradients(OwnForward(model), nn.CrossEntropyLoss(), 1.0)
        case "ghost":
            model = OwnForward(model)
            return ClippedGradients(model, nn.CrossEntropyLoss(), 1.0, "ghost")
        case _:
            return ClippedGradients(model, nn.CrossEntropyLoss(), 1.0)


def measure(case: str, batch_size: int, repeats: int, threads: int) -> Figures:
    """Measure one case in this process."""
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(784, 1000),
        nn.ReLU(),
        nn.Linear(1000, 1000),
        nn.ReLU(),
        nn.Linear(1000, 10),
    )
    inputs, targets = torch.randn(batch_size, 784), torch.randint(10, (batch_size,))
    nn.Linear(2, 2)(torch.zeros(2, 2)).sum().backward()  # loads what torch loads late
    before = resident("VmRSS")
    reset_peak()
    step = make_step(case, model, batch_size)
    seconds = [timed(lambda: step(inputs, targets))[0] for _ in range(1 + repeats)]
    return Figures(
        seconds=statistics.median(seconds[1:]),
        megabytes=(resident("VmHWM") - before) / 1024,
    )


def main() -> None:
    """Measure every case in a process of its own, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--case", choices=CASES, help="measure this one and print JSON")
    parser.add_argument("--out", type=Path, default=Path("outputs/client_step.json"))
    arguments = parser.parse_args()
    settings = {
        "batch_size": arguments.batch_size,
        "repeats": arguments.repeats,
        "threads": arguments.threads,
    }
    if arguments.case:
        print(json.dumps(measure(arguments.case, **settings)))
        return
    results: dict[str, Figures] = {}
    for case in CASES:
        command = [sys.executable, "-m", "simulations.benchmarks.client_step"]
        command += ["--case", case]
        for name, value in settings.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        results[case] = json.loads(done.stdout)
    report(results, arguments.batch_size)
    record(arguments.out, settings, results)


def report(results: dict[str, Figures], batch_size: int) -> None:
    """Print the figures, and their ratios to the per-example path."""
    table = Table(title=f"One client step, MLP 784-1000-1000-10, batch {batch_size}")
    for column in ("path", "ms", "times faster", "peak MB", "of per-example"):
        table.add_column(column, justify="left" if column == "path" else "right")
    base = results["per-example"]
    for case, words in CASES.items():
        mine = results[case]
        table.add_row(
            words,
            f"{1e3 * mine['seconds']:.1f}",
            f"{base['seconds'] / mine['seconds']:.1f}",
            f"{mine['megabytes']:.0f}",
            f"{mine['megabytes'] / base['megabytes']:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
