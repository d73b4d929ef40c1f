"""Rounds per second of the engines: ``python -m simulations.benchmarks.engine``.

The same strategy and the same real clients (private gradient, momentum, d = 69) in
process, in process as one batch, and on Ray; the first two in turns with Ray, so that a
change of the machine's load shows. The start of an engine is not counted: a round is
the time between two evaluations of the server, after a warm-up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.simulation.batched import BatchedGrid
from flwr_safedshb.simulation.in_process import InProcessGrid
from simulations.app import make_client_app
from simulations.benchmarks.plots import Panel
from simulations.benchmarks.result import Measurement, Result, run_benchmark
from simulations.benchmarks.rounds import (
    Marks,
    RoundCost,
    make_table,
    summarize_rounds,
    train,
)
from simulations.engines import simulate
from simulations.experiment import build_untrained

NODES, MALICIOUS = 7, 3
OVERRIDES = f"num_nodes={NODES} num_malicious_nodes={MALICIOUS}"
WARM_UP = 10
GRIDS: Mapping[str, type[InProcessGrid]] = {
    "in process": InProcessGrid,
    "batched": BatchedGrid,
}
# CPUs that Ray gives to a client; Flower's default is 2.
RAY = {"Ray, 1 CPU a client": 1, "Ray, 2 CPUs a client": 2}
REFERENCE = "Ray, 1 CPU a client"


def measure_engine(engine: str, rounds: int) -> RoundCost:
    """Measure so many rounds on an engine, by a clock on the wall, after a warm-up."""
    marks: Marks = []
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        steps = WARM_UP + rounds
        marks.extend(
            train(grid, SMEA(), OVERRIDES, NODES, MALICIOUS, steps, time.perf_counter)
        )

    client = make_client_app(OVERRIDES)
    if engine in RAY:
        simulate(server, client, NODES, RAY[engine])
    else:
        grid = GRIDS[engine](client, NODES)
        server(grid, grid.server_context())
    return summarize_rounds(engine, NODES, marks[WARM_UP:])


def measure_overhead(calls: int) -> float:
    """Return the seconds that an `InProcessGrid` adds to the work of a client.

    That is a message through the grid to an app that does nothing but reply, less what
    the app takes when it is called itself.
    """
    app = ClientApp()

    @app.train()
    def echo(message: Message, context: Context) -> Message:
        records = {
            "arrays": message.content["arrays"],
            "metrics": MetricRecord({"num-examples": 1}),
        }
        return Message(RecordDict(records), reply_to=message)

    grid = InProcessGrid(app, 1)
    content = RecordDict(
        {"arrays": ArrayRecord(build_untrained(OVERRIDES).state_dict())}
    )
    message = Message(content, grid.get_node_ids()[0], "train")
    context = grid.server_context()
    through, direct = [], []
    for _ in range(calls):
        start = time.perf_counter()
        list(grid.send_and_receive([message]))
        between = time.perf_counter()
        app(message, context)
        through.append(between - start)
        direct.append(time.perf_counter() - between)
    return statistics.median(through) - statistics.median(direct)


def measure(quick: bool) -> Result:
    """Measure every engine."""
    rounds, ray_rounds = (20, 3) if quick else (300, 60)
    turns = [measure_engine(engine, rounds) for engine in GRIDS]
    for engine in RAY:
        turns.append(measure_engine(engine, ray_rounds))
        turns += [measure_engine(mine, rounds) for mine in GRIDS]
    typical = {
        engine: statistics.median(t.seconds for t in turns if t.name == engine)
        for engine in (*GRIDS, *RAY)
    }
    overhead = 1e3 * measure_overhead(200 if quick else 5000)
    speed = {engine: 1 / seconds for engine, seconds in typical.items()}
    title = f"One round, n = {NODES}, d = 69, real clients"
    return Result(
        tables=[make_table(title, turns, "By a clock on the wall.")],
        figures={
            "overhead of the grid": Measurement(overhead),
            **{
                f"{ray} / {mine}": Measurement(typical[ray] / typical[mine])
                for ray in RAY
                for mine in GRIDS
            },
        },
        costs={
            **{f"{e} / {REFERENCE}": typical[e] / typical[REFERENCE] for e in GRIDS},
            "overhead ms": overhead,
        },
        raw=[asdict(turn) for turn in turns],
        panels=[Panel(title, "", "rounds per second", {"": speed}, kind="bars")],
    )


if __name__ == "__main__":
    raise SystemExit(run_benchmark("engine"))
