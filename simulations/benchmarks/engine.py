"""Rounds per second in process and on Ray: ``python -m simulations.benchmarks.engine``.

The same ServerApp and the same real client (private gradient, momentum, d = 69) on both
engines, in turns, so that a change of the machine's load shows. The start of an engine
is not counted: a round is the time between two evaluations of the server, after a
warm-up.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from rich.console import Console
from rich.table import Table

from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.grids import InProcessGrid
from flwr_safedshb.strategy import SafeDSHB
from simulations.app import make_client_app, untrained
from simulations.benchmarks.measure import record
from simulations.engines import simulate

NODES, MALICIOUS = 7, 3
OVERRIDES = f"num_nodes={NODES} num_malicious_nodes={MALICIOUS}"
TARGET = 20.0
WARM_UP = 10
IN_PROCESS = "in process"
# Engines by name: CPUs that Ray gives to a client; Flower's default is 2.
RAY = {"Ray, 1 CPU a client": 1, "Ray, 2 CPUs a client": 2}


@dataclass(frozen=True)
class Figures:
    """Seconds of the rounds of one engine: the median and the middle half."""

    engine: str
    rounds: int
    median: float
    lower: float
    upper: float


def server_app(rounds: int, marks: list[float]) -> ServerApp:
    """Return a ServerApp that trains and marks the time after every round."""
    app = ServerApp()
    initial = ArrayRecord(untrained(OVERRIDES).state_dict())

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        def mark(server_round: int, arrays: ArrayRecord) -> None:
            marks.append(time.perf_counter())

        strategy = SafeDSHB(SMEA(), MALICIOUS, min_available_nodes=NODES)
        strategy.start(grid, initial, rounds, evaluate_fn=mark)

    return app


def measure(engine: str, rounds: int) -> Figures:
    """Measure so many rounds on an engine, after a warm-up."""
    marks: list[float] = []
    server = server_app(WARM_UP + rounds, marks)
    client = make_client_app(OVERRIDES)
    if engine in RAY:
        simulate(server, client, NODES, RAY[engine])
    else:
        grid = InProcessGrid(client, NODES)
        server(grid, grid.server_context())
    marks = marks[WARM_UP:]
    seconds = [after - before for before, after in itertools.pairwise(marks)]
    lower, median, upper = statistics.quantiles(seconds, n=4)
    return Figures(engine, len(seconds), median, lower, upper)


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300, help="in process")
    parser.add_argument("--ray-rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("outputs/engine.json"))
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    results = [measure(IN_PROCESS, arguments.rounds)]
    for engine in RAY:
        results.append(measure(engine, arguments.ray_rounds))
        results.append(measure(IN_PROCESS, arguments.rounds))
    report(results)
    record(arguments.out, vars(arguments) | {"out": ""}, [asdict(r) for r in results])


def report(results: list[Figures]) -> None:
    """Print the figures, and how they stand to the target."""
    table = Table(title=f"One round, n = {NODES}, d = 69, real clients")
    for column in ("engine", "rounds", "ms", "middle half", "rounds/s"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for mine in results:
        table.add_row(
            mine.engine,
            str(mine.rounds),
            f"{1e3 * mine.median:.1f}",
            f"{1e3 * mine.lower:.1f} to {1e3 * mine.upper:.1f}",
            f"{1 / mine.median:.1f}",
        )
    console = Console()
    console.print(table)
    turns = [mine.median for mine in results if mine.engine == IN_PROCESS]
    typical = statistics.median(turns)
    for mine in results:
        if mine.engine in RAY:
            ratio = mine.median / typical
            met = "met" if ratio >= TARGET else "missed"
            console.print(
                f"in process is {ratio:.1f} times faster than {mine.engine}; target "
                f"{TARGET:.0f}: {met}",
                highlight=False,
            )


if __name__ == "__main__":
    main()
