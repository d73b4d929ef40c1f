"""Whole training runs: ``python -m simulations.benchmarks.end_to_end``.

The paper's task under ALIE with SMEA, private, beside ByzFL's own training loop, which
is not; and federations of up to 1000 clients with Filter. Times are the processor's.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from matplotlib.figure import Figure

from flwr_safedshb.aggregation import SMEA, Filter, Rule
from flwr_safedshb.attacks import ALIE
from flwr_safedshb.simulation.adversarial import AdversarialGrid
from flwr_safedshb.simulation.batched import BatchedGrid
from flwr_safedshb.simulation.in_process import InProcessGrid
from flwr_safedshb.strategy import SafeDSHB
from simulations.app import make_client_app
from simulations.benchmarks import byzfl_loop
from simulations.benchmarks.measure import resident, worked
from simulations.benchmarks.outcome import Outcome, Table, at_least, at_most, main
from simulations.experiment import untrained

NODES, MALICIOUS = 7, 3
TASK = f"num_nodes={NODES} num_malicious_nodes={MALICIOUS} attack=alie"
SIZES = (100, 200, 500, 1000)
WARM_UP = 3


@dataclass(frozen=True)
class Rounds:
    """What rounds of one kind took.

    Attributes
    ----------
    seconds : float
        Median of the processor's time for a round.
    kilobytes : float
        By which memory grew from the first half of the rounds to their end, for each
        round of the second half.
    """

    name: str
    nodes: int
    rounds: int
    seconds: float
    kilobytes: float


def train(
    name: str, grid: Grid, rule: Rule, overrides: str, nodes: int, f: int, rounds: int
) -> Rounds:
    """Train so many rounds after a warm-up."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    marks: list[tuple[float, int]] = []

    def mark(server_round: int, arrays: ArrayRecord) -> None:
        marks.append((time.process_time(), resident("VmRSS")))

    initial = ArrayRecord(untrained(overrides).state_dict())
    strategy = SafeDSHB(rule, f, min_available_nodes=nodes)
    strategy.start(grid, initial, WARM_UP + rounds, evaluate_fn=mark)
    times, memory = zip(*marks[WARM_UP:], strict=True)
    seconds = [after - before for before, after in itertools.pairwise(times)]
    half = len(memory) // 2
    growth = (memory[-1] - memory[half]) / (len(memory) - half)
    return Rounds(name, nodes, rounds, statistics.median(seconds), growth)


def attacked(kind: type[InProcessGrid], rounds: int) -> Rounds:
    """Train the paper's task under attack."""
    grid = kind(make_client_app(TASK), NODES)
    hijacked = AdversarialGrid(grid, ALIE(), MALICIOUS, SMEA())
    name = "batched" if kind is BatchedGrid else "in process"
    return train(name, hijacked, SMEA(), TASK, NODES, MALICIOUS, rounds)


def federation(nodes: int, rounds: int) -> Rounds:
    """Train a federation of so many clients, a fifth of them mistrusted."""
    f = nodes // 5
    overrides = (
        f"num_nodes={nodes} num_malicious_nodes={f} data.num_examples={60 * nodes}"
    )
    grid = BatchedGrid(make_client_app(overrides), nodes)
    return train("batched", grid, Filter(), overrides, nodes, f, rounds)


def byzfl(rounds: int) -> Rounds:
    """Train the same task with ByzFL's loop."""
    play = byzfl_loop.round_function(TASK, NODES - MALICIOUS, MALICIOUS)
    seconds = [worked(play)[0] for _ in range(WARM_UP + rounds)][WARM_UP:]
    return Rounds("ByzFL, not private", NODES, rounds, statistics.median(seconds), 0.0)


def run(quick: bool) -> Outcome:
    """Measure all of it."""
    torch.set_num_threads(1)
    rounds, sizes = (6, (10, 20)) if quick else (300, SIZES)
    loops = [attacked(InProcessGrid, rounds), attacked(BatchedGrid, rounds)]
    checks = []
    if byzfl_loop.available():
        peer = byzfl(max(6, rounds // 3))
        ratio = peer.seconds / loops[-1].seconds
        checks.append(at_least("ByzFL / batched, with privacy", ratio, 3.0))
        loops.append(peer)
    grown = [federation(nodes, 6 if quick else 20) for nodes in sizes]
    slope = _slope(grown)
    checks.append(at_most("growth of a round with n", slope, 1.0, "power of n"))
    flat = loops[1].kilobytes
    checks.append(at_most("growth of memory, kB a round", flat, 8.0, "kB"))
    return Outcome(
        name="end_to_end",
        title="End to end",
        tables=[
            _table(f"One round under ALIE, n = {NODES}, f = {MALICIOUS}, SMEA", loops),
            _table("One round, f = n/5, Filter, d = 69", grown),
        ],
        checks=checks,
        costs={
            "attacked round / its own without batches": loops[1].seconds
            / loops[0].seconds,
            "round of the largest federation, ms a client": 1e3
            * grown[-1].seconds
            / grown[-1].nodes,
        },
        settings={"task": TASK, "sizes": sizes, "warm_up": WARM_UP},
        results=[asdict(mine) for mine in (*loops, *grown)],
        plot=lambda figure: _draw(figure, grown, slope),
    )


def _slope(grown: Sequence[Rounds]) -> float:
    """Return the power of n with which a round grows, by least squares on the logs."""
    nodes = np.log([mine.nodes for mine in grown])
    seconds = np.log([mine.seconds for mine in grown])
    return float(np.polyfit(nodes, seconds, 1)[0])


def _table(title: str, rounds: Sequence[Rounds]) -> Table:
    rows = [
        (
            mine.name,
            str(mine.nodes),
            str(mine.rounds),
            f"{1e3 * mine.seconds:.2f}",
            f"{1e3 * mine.seconds / mine.nodes:.3f}",
        )
        for mine in rounds
    ]
    heads = ("loop", "n", "rounds", "ms a round", "ms a client")
    return Table(title, heads, rows, "Medians of the processor's time.")


def _draw(figure: Figure, grown: Sequence[Rounds], slope: float) -> None:
    figure.set_size_inches(5, 3.4)
    axes = figure.subplots()
    nodes = np.array([mine.nodes for mine in grown], dtype=float)
    seconds = np.array([mine.seconds for mine in grown])
    axes.loglog(nodes, 1e3 * seconds, "o-", label=f"measured: n^{slope:.2f}")
    linear = 1e3 * seconds[0] * nodes / nodes[0]
    axes.loglog(nodes, linear, "--", color="0.5", label="linear")
    axes.set_xlabel("clients n")
    axes.set_ylabel("ms a round")
    axes.legend()


if __name__ == "__main__":
    raise SystemExit(main(run, __doc__))
