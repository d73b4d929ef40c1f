"""Whole training runs: ``python -m simulations.benchmarks.end_to_end``.

The paper's task under ALIE with SMEA, private, beside ByzFL's own training loop, which
is not; and federations of up to 1000 clients with Filter. Times are the processor's.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from importlib.util import find_spec

import torch

from flwr_safedshb.aggregation import SMEA, Filter
from flwr_safedshb.attacks import ALIE
from flwr_safedshb.simulation.adversarial import AdversarialGrid
from flwr_safedshb.simulation.batched import BatchedGrid
from flwr_safedshb.simulation.in_process import InProcessGrid
from simulations.app import make_client_app
from simulations.benchmarks.measure import fit_exponent, resident_kilobytes
from simulations.benchmarks.peers import byzfl_round
from simulations.benchmarks.plots import Panel
from simulations.benchmarks.result import Measurement, Result, run_benchmark
from simulations.benchmarks.rounds import (
    Marks,
    RoundCost,
    make_table,
    summarize_rounds,
    train,
)

NODES, MALICIOUS = 7, 3
TASK = f"num_nodes={NODES} num_malicious_nodes={MALICIOUS} attack=alie"
SIZES = (100, 200, 500, 1000)
WARM_UP = 3


def measure_attacked(name: str, kind: type[InProcessGrid], rounds: int) -> RoundCost:
    """Train the paper's task under attack."""
    grid = kind(make_client_app(TASK), NODES)
    hijacked = AdversarialGrid(grid, ALIE(), MALICIOUS, SMEA())
    marks = train(hijacked, SMEA(), TASK, NODES, MALICIOUS, WARM_UP + rounds)
    return summarize_rounds(name, NODES, marks[WARM_UP:])


def measure_federation(nodes: int, rounds: int) -> RoundCost:
    """Train a federation of so many clients, a fifth of them mistrusted."""
    f = nodes // 5
    overrides = (
        f"num_nodes={nodes} num_malicious_nodes={f} data.num_examples={60 * nodes}"
    )
    grid = BatchedGrid(make_client_app(overrides), nodes)
    marks = train(grid, Filter(), overrides, nodes, f, WARM_UP + rounds)
    return summarize_rounds("batched", nodes, marks[WARM_UP:])


def measure_byzfl(rounds: int) -> RoundCost:
    """Train the same task with ByzFL's loop."""
    play = byzfl_round(TASK, NODES - MALICIOUS, MALICIOUS)
    marks: Marks = []
    for _ in range(1 + WARM_UP + rounds):
        play()
        marks.append((time.thread_time(), resident_kilobytes()))
    return summarize_rounds("ByzFL, not private", NODES, marks[WARM_UP:])


def measure(quick: bool) -> Result:
    """Measure all of it."""
    torch.set_num_threads(1)
    rounds, sizes = (6, (10, 20)) if quick else (300, SIZES)
    single = measure_attacked("in process", InProcessGrid, rounds)
    batched = measure_attacked("batched", BatchedGrid, rounds)
    loops, figures = [single, batched], {}
    if find_spec("byzfl") is not None:
        loops.append(measure_byzfl(max(6, rounds // 3)))
        ratio = loops[-1].seconds / batched.seconds
        figures["ByzFL / batched, with privacy"] = Measurement(ratio)
    grown = [measure_federation(nodes, 6 if quick else 20) for nodes in sizes]
    times = [cost.seconds for cost in grown]
    figures |= {
        "growth of a round: exponent of n": Measurement(fit_exponent(sizes, times)),
        "growth of memory": Measurement(batched.kilobytes),
    }
    title = "One round, f = n/5, Filter, d = 69"
    words = "By the processor's time."
    return Result(
        tables=[
            make_table(f"One round under ALIE, n = {NODES}, f = 3, SMEA", loops, words),
            make_table(title, grown, words),
        ],
        figures=figures,
        costs={
            "attacked round / its own without batches": batched.seconds
            / single.seconds,
            "round of the largest federation, ms a client": 1e3 * times[-1] / sizes[-1],
        },
        raw=[asdict(cost) for cost in (*loops, *grown)],
        panels=[
            Panel(
                title,
                "clients n",
                "ms a round",
                {
                    "measured": {n: 1e3 * t for n, t in zip(sizes, times, strict=True)},
                    "linear": {n: 1e3 * times[0] * n / sizes[0] for n in sizes},
                },
            )
        ],
    )


if __name__ == "__main__":
    raise SystemExit(run_benchmark("end_to_end"))
