"""Rounds of a real federation: ``python -m simulations.benchmarks.deployment``.

A SuperLink and nodes on this machine, with TLS and node keys: ours (the gate,
`safedshb node`, SafeDSHB) beside Flower's own programs with FedAvg on the same model,
and beside the lower bound: one bare exchange over TLS and the steps themselves.
``--quick`` is the first row alone, with fewer rounds.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from simulations.benchmarks.federated import FEDAVG, OURS
from simulations.benchmarks.lower_bound import measure_lower_bound
from simulations.benchmarks.result import (
    Measurement,
    Result,
    ResultTable,
    run_benchmark,
)
from simulations.loopback import Deployment, free_port, toml
from simulations.loopback.processes import Value

# Nodes, and units in the hidden layers: 69, 1.8 and 12.8 million parameters.
SIZES = {0: "69", 1000: "1.8M", 3200: "12.8M"}
CELLS = ((4, 0), (4, 1000), (4, 3200), (1, 0), (12, 0), (20, 0))
ROUNDS, QUICK_ROUNDS = 10, 5
# Rounds before the figures count: in the first every worker loads the app.
LOADING = 2

_APP = Path(__file__).parent / "flower-app"
# Every process that a node starts carries the node's name in its environment, so that
# its processor time and memory can be summed whatever it was started by.
_MARK = "SAFEDSHB_BENCHMARK_NODE"
_TICKS = os.sysconf("SC_CLK_TCK")
_ROUND_SECONDS = 240.0

Cell = tuple[int, int]


class OurDeployment(Deployment):
    """Ours: the gate, and `safedshb node`."""

    strategy = OURS

    def start_node(self, index: int, **more: object) -> None:
        """Start a node whose processes can be found."""
        super().start_node(index, environment={_MARK: str(index)}, **more)  # type: ignore[arg-type]


class FlowerDeployment(Deployment):
    """Flower's own programs: SuperNodes that start a process for each message."""

    strategy = FEDAVG

    def start_gate(self) -> None:
        """Let the nodes come to the SuperLink itself."""
        self.gate_port = self.port

    def start_node(self, index: int, **more: object) -> None:
        """Start a SuperNode as Flower's documentation does."""
        assert self.credentials is not None
        entries: dict[str, Value] = {
            "partition-id": index,
            "num-partitions": self._num_nodes,
        }
        self._processes.start(
            f"node-{index}",
            "flower-supernode",
            *("--superlink", f"127.0.0.1:{self.port}"),
            *("--root-certificates", str(self.credentials.ca)),
            "--auth-supernode-private-key",
            str(self.credentials.node_key(f"node-{index}")),
            *("--host", "127.0.0.1", "--port", str(free_port())),
            *("--node-config", toml(entries)),
            environment={_MARK: str(index)},
        )


KINDS: Mapping[str, type[OurDeployment | FlowerDeployment]] = {
    "ours": OurDeployment,
    "Flower": FlowerDeployment,
}


@dataclass(frozen=True)
class FederationCost:
    """What a federation took, after its first rounds."""

    round: float  # median seconds
    message: float  # processor seconds that a node spends on a message
    memory: float  # MB of a node, shared pages shared out


@dataclass(frozen=True)
class FederationRow:
    """One cell: the lower bound of a round in seconds, ours, and Flower's own."""

    lower_bound: float
    ours: FederationCost
    flower: FederationCost


def measure_row(nodes: int, hidden: int, rounds: int) -> FederationRow:
    """Measure the lower bound, ours, then Flower's own, on the same machine."""
    with tempfile.TemporaryDirectory(prefix="safedshb-") as scratch:
        folder = Path(scratch)
        bound = measure_lower_bound(folder / "lower-bound", nodes, hidden)
        ours, flower = (
            measure_federation(kind, folder / name, nodes, hidden, rounds)
            for name, kind in KINDS.items()
        )
    return FederationRow(bound, ours, flower)


def measure_federation(
    kind: type[OurDeployment | FlowerDeployment],
    folder: Path,
    num_nodes: int,
    hidden: int,
    rounds: int,
) -> FederationCost:
    """Run a federation with TLS and node keys, and measure it."""
    config = {"max-epsilon": 1e6, "delta": 1e-5} if kind is OurDeployment else {}
    trace = folder / "trace"
    with kind(folder, num_nodes, config, _APP) as federation:
        run_id = federation.submit(
            {
                "strategy": kind.strategy,
                "hidden": hidden,
                "rounds": rounds,
                "nodes": num_nodes,
                "trace": str(trace),
            }
        )
        # One line before the first round, and one after each.
        _wait_lines(federation, run_id, trace, 1 + LOADING)
        before = sum(map(_processor_seconds, _find_processes(num_nodes)))
        _wait_lines(federation, run_id, trace, 1 + rounds)
        after = sum(map(_processor_seconds, _find_processes(num_nodes)))
        memory = sum(map(_megabytes, _find_processes(num_nodes))) / num_nodes
    times = [float(line) for line in trace.read_text().split()]
    lengths = [end - begin for begin, end in pairwise(times)]
    messages = num_nodes * (rounds - LOADING)
    return FederationCost(
        round=median(lengths[LOADING:]),
        message=(after - before) / messages,
        memory=memory,
    )


def _wait_lines(federation: Deployment, run_id: str, trace: Path, lines: int) -> None:
    deadline = time.monotonic() + _ROUND_SECONDS * lines
    while not trace.exists() or len(trace.read_text().split()) < lines:
        if time.monotonic() > deadline:
            log = federation.run_log(run_id)[-3000:]
            raise TimeoutError(f"no {lines} rounds:\n{log}")
        time.sleep(0.05)


def _find_processes(num_nodes: int) -> Iterator[Path]:
    """Find all processes of this benchmark's nodes in /proc."""
    marks = {f"{_MARK}={index}".encode() for index in range(num_nodes)}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if marks & {*(entry / "environ").read_bytes().split(b"\0")}:
                yield entry


def _processor_seconds(entry: Path) -> float:
    """Return what a process has used, with the children that have ended."""
    with suppress(OSError):
        words = (entry / "stat").read_text().rpartition(")")[2].split()
        return sum(map(int, words[11:15])) / _TICKS
    return 0.0


def _megabytes(entry: Path) -> float:
    with suppress(OSError):
        for line in (entry / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def measure(quick: bool) -> Result:
    """Measure every cell."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    cells = CELLS[:1] if quick else CELLS
    rows = {cell: measure_row(*cell, rounds) for cell in cells}
    first = rows[CELLS[0]]
    return Result(
        tables=[_make_table(rows)],
        figures={
            "Flower's round / ours, 4 nodes, d = 69": Measurement(
                first.flower.round / first.ours.round
            ),
            "processor time of a message": Measurement(first.ours.message),
        },
        costs={
            "round, ours / Flower": first.ours.round / first.flower.round,
            "processor s a message": first.ours.message,
        },
        raw=[
            {"nodes": nodes, "parameters": SIZES[hidden], **asdict(row)}
            for (nodes, hidden), row in rows.items()
        ],
    )


def _make_table(rows: Mapping[Cell, FederationRow]) -> ResultTable:
    return ResultTable(
        "A round, with TLS and node keys",
        (
            *("nodes", "d", "bound", "ours", "Flower", "times"),
            *("CPU", "Flower's", "MB", "Flower's"),
        ),
        [
            (
                *(nodes, SIZES[hidden], row.lower_bound),
                *(row.ours.round, row.flower.round),
                row.flower.round / row.ours.round,
                *(row.ours.message, row.flower.message),
                *(row.ours.memory, row.flower.memory),
            )
            for (nodes, hidden), row in rows.items()
        ],
        "Seconds of a round, by the clock on the wall, medians after the first "
        f"{LOADING}; bound: a bare exchange over TLS and the steps. CPU: "
        "processor seconds of a node for a message; MB: memory of a node. Flower looks "
        "for tasks every 0.2 s here, 1 s by default.",
    )


if __name__ == "__main__":
    raise SystemExit(run_benchmark("deployment"))
