"""What rounds of a training cost, for the benchmarks `engine` and `end_to_end`."""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from flwr_safedshb.aggregation import Rule
from flwr_safedshb.strategy import SafeDSHB
from simulations.benchmarks.measure import resident_kilobytes
from simulations.benchmarks.result import ResultTable, TableRow
from simulations.experiment import build_untrained

Marks = list[tuple[float, int]]  # after each round: a clock, and resident kB


@dataclass(frozen=True)
class RoundCost:
    """What rounds of one kind took: quartiles of the seconds, and growing memory.

    `kilobytes` is by how much memory grew from the first half of the rounds to their
    end, for each round of the second half.
    """

    name: str
    nodes: int
    rounds: int
    lower: float
    seconds: float
    upper: float
    kilobytes: float


def train(
    grid: Grid,
    rule: Rule,
    overrides: str,
    nodes: int,
    f: int,
    rounds: int,
    clock: Callable[[], float] = time.process_time,
) -> Marks:
    """Train an experiment's model, and mark the time and memory after every round."""
    # Flower's log of a round takes longer than the round.
    logging.getLogger("flwr").setLevel(logging.WARNING)
    marks: Marks = []

    def mark(server_round: int, arrays: ArrayRecord) -> None:
        marks.append((clock(), resident_kilobytes()))

    initial = ArrayRecord(build_untrained(overrides).state_dict())
    strategy = SafeDSHB(rule, f, min_available_nodes=nodes)
    strategy.start(grid, initial, rounds, evaluate_fn=mark)
    return marks


def summarize_rounds(name: str, nodes: int, marks: Marks) -> RoundCost:
    """Return the cost of the rounds between marks."""
    times, memory = zip(*marks, strict=True)
    seconds = [after - before for before, after in itertools.pairwise(times)]
    half = len(memory) // 2
    growth = (memory[-1] - memory[half]) / (len(memory) - half)
    lower, middle, upper = statistics.quantiles(seconds, n=4)
    return RoundCost(name, nodes, len(seconds), lower, middle, upper, growth)


def make_table(title: str, costs: Sequence[RoundCost], caption: str) -> ResultTable:
    """Return a row for each kind of rounds."""
    heads = ("loop", "n", "rounds", "ms a round", "from", "to", "ms a client", "1/s")
    rows: list[TableRow] = [
        (
            *(cost.name, cost.nodes, cost.rounds),
            *(1e3 * s for s in (cost.seconds, cost.lower, cost.upper)),
            *(1e3 * cost.seconds / cost.nodes, 1 / cost.seconds),
        )
        for cost in costs
    ]
    words = f"{caption} from, to: the middle half. 1/s: rounds a second."
    return ResultTable(title, heads, rows, words)
