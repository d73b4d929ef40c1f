"""Rounds per second of the engines: ``python -m simulations.benchmarks.engine``.

The same ServerApp and the same real clients (private gradient, momentum, d = 69) in
process, in process as one batch, and on Ray; the first two in turns with Ray, so that a
change of the machine's load shows. The start of an engine is not counted: a round is
the time between two evaluations of the server, after a warm-up.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from matplotlib.figure import Figure

from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.simulation.batched import BatchedGrid
from flwr_safedshb.simulation.in_process import InProcessGrid
from flwr_safedshb.strategy import SafeDSHB
from simulations.app import make_client_app
from simulations.benchmarks.outcome import Outcome, Table, at_least, at_most, main
from simulations.engines import simulate
from simulations.experiment import untrained

NODES, MALICIOUS = 7, 3
OVERRIDES = f"num_nodes={NODES} num_malicious_nodes={MALICIOUS}"
WARM_UP = 10
GRIDS: Mapping[str, type[InProcessGrid]] = {
    "in process": InProcessGrid,
    "batched": BatchedGrid,
}
# CPUs that Ray gives to a client; Flower's default is 2.
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
    # Flower's log of a round takes longer than the round.
    logging.getLogger("flwr").setLevel(logging.WARNING)
    marks: list[float] = []
    server = server_app(WARM_UP + rounds, marks)
    client = make_client_app(OVERRIDES)
    if engine in RAY:
        simulate(server, client, NODES, RAY[engine])
    else:
        grid = GRIDS[engine](client, NODES)
        server(grid, grid.server_context())
    marks = marks[WARM_UP:]
    seconds = [after - before for before, after in itertools.pairwise(marks)]
    lower, median, upper = statistics.quantiles(seconds, n=4)
    return Figures(engine, len(seconds), median, lower, upper)


def overhead(calls: int) -> float:
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
    content = RecordDict({"arrays": ArrayRecord(untrained(OVERRIDES).state_dict())})
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


def run(quick: bool) -> Outcome:
    """Measure every engine."""
    rounds, ray_rounds = (20, 3) if quick else (300, 60)
    turns = [measure(engine, rounds) for engine in GRIDS]
    for engine in RAY:
        turns.append(measure(engine, ray_rounds))
        turns += [measure(mine, rounds) for mine in GRIDS]
    typical = {
        engine: statistics.median(t.median for t in turns if t.engine == engine)
        for engine in (*GRIDS, *RAY)
    }
    added = overhead(200 if quick else 5000)
    checks = [at_most("overhead of the grid, ms a client", 1e3 * added, 0.2, "ms")]
    for ray, seconds in typical.items():
        if ray in RAY:
            for mine, bound in (("in process", 20.0), ("batched", 50.0)):
                checks.append(
                    at_least(f"{ray} / {mine}", seconds / typical[mine], bound)
                )
    costs = {
        f"{e} / {next(iter(RAY))}": typical[e] / typical[next(iter(RAY))] for e in GRIDS
    }
    return Outcome(
        name="engine",
        title="Engines",
        tables=[_table(turns)],
        checks=checks,
        costs={**costs, "overhead ms": 1e3 * added},
        settings={"nodes": NODES, "malicious": MALICIOUS, "d": 69, "warm_up": WARM_UP},
        results=[asdict(turn) for turn in turns],
        plot=lambda figure: _draw(figure, typical),
    )


def _table(turns: list[Figures]) -> Table:
    rows = [
        (
            turn.engine,
            str(turn.rounds),
            f"{1e3 * turn.median:.2f}",
            f"{1e3 * turn.lower:.2f} to {1e3 * turn.upper:.2f}",
            f"{1 / turn.median:.0f}",
        )
        for turn in turns
    ]
    heads = ("engine", "rounds", "ms a round", "middle half", "rounds/s")
    return Table(f"One round, n = {NODES}, d = 69, real clients", heads, rows)


def _draw(figure: Figure, typical: Mapping[str, float]) -> None:
    figure.set_size_inches(7, 2.6)
    axes = figure.subplots()
    names = list(typical)
    axes.barh(names, [1 / typical[name] for name in names], color="C0")
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.set_xlabel(f"rounds per second (n = {NODES}, d = 69)")
    for i, name in enumerate(names):
        axes.text(1 / typical[name], i, f" {1 / typical[name]:.0f}", va="center")
    axes.margins(x=0.15)


if __name__ == "__main__":
    raise SystemExit(main(run, __doc__))
