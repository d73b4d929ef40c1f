"""Federations for the benchmark `deployment`, and what their nodes take.

Every process that a node starts carries the node's name in its environment, so that
its processor time and its memory can be summed whatever it was started by.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from simulations.benchmarks.federated import FEDAVG, OURS
from simulations.loopback import Deployment, free_port, toml
from simulations.loopback.processes import Value

APP = Path(__file__).parent / "flower-app"
# Rounds before the figures count: in the first every worker loads the app.
LOADING = 2
_MARK = "SAFEDSHB_BENCHMARK_NODE"
_TICKS = os.sysconf("SC_CLK_TCK")
_ROUND_SECONDS = 240.0


class OurDeployment(Deployment):
    """Ours: the gate, and `safedshb node`."""

    strategy = OURS

    def start_node(self, index: int, **more: object) -> None:
        """Start a node whose processes can be found."""
        super().start_node(index, environment={_MARK: str(index)}, **more)  # type: ignore[arg-type]


class FlowersOwn(Deployment):
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


@dataclass(frozen=True)
class Taken:
    """What a federation took, after its first rounds.

    Attributes
    ----------
    first : float
        Seconds until the end of the first round.
    round : float
        Median seconds of a round.
    message : float
        Processor seconds that a node spends on a message.
    memory : float
        MB of a node, shared pages shared out.
    """

    first: float
    round: float
    message: float
    memory: float


def taken(
    kind: type[OurDeployment | FlowersOwn],
    folder: Path,
    num_nodes: int,
    hidden: int,
    rounds: int,
) -> Taken:
    """Run a federation with TLS and node keys, and measure it."""
    config = {"max-epsilon": 1e6, "delta": 1e-5} if kind is OurDeployment else {}
    trace = folder / "trace"
    with kind(folder, num_nodes, config, APP) as nodes:
        run_id = nodes.submit(
            {
                "strategy": kind.strategy,
                "hidden": hidden,
                "rounds": rounds,
                "nodes": num_nodes,
                "trace": str(trace),
            }
        )
        # One line before the first round, and one after each.
        _wait(nodes, run_id, trace, 1 + LOADING)
        before = _processor_seconds(num_nodes)
        _wait(nodes, run_id, trace, 1 + rounds)
        after = _processor_seconds(num_nodes)
        memory = sum(_memory(pid) for pid in _pids(num_nodes)) / num_nodes
    times = [float(line) for line in trace.read_text().split()]
    lengths = [after - before for before, after in pairwise(times)]
    messages = num_nodes * (rounds - LOADING)
    return Taken(
        first=lengths[0],
        round=median(lengths[LOADING:]),
        message=(after - before) / messages,
        memory=memory,
    )


def _wait(nodes: Deployment, run_id: str, trace: Path, lines: int) -> None:
    deadline = time.monotonic() + _ROUND_SECONDS * lines
    while not trace.exists() or len(trace.read_text().split()) < lines:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {lines} rounds:\n{nodes.run_log(run_id)[-3000:]}")
        time.sleep(0.05)


def _pids(num_nodes: int) -> list[Path]:
    """Return all processes of this benchmark's nodes."""
    marks = {f"{_MARK}={index}".encode() for index in range(num_nodes)}
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if marks & {*(entry / "environ").read_bytes().split(b"\0")}:
                found.append(entry)
    return found


def _processor_seconds(num_nodes: int) -> float:
    """Return what the nodes have used, with the children that have ended."""
    ticks = 0
    for entry in _pids(num_nodes):
        with suppress(OSError):
            words = (entry / "stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, words[11:15]))
    return ticks / _TICKS


def _memory(entry: Path) -> float:
    with suppress(OSError):
        for line in (entry / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


KINDS: Mapping[str, type[OurDeployment | FlowersOwn]] = {
    "ours": OurDeployment,
    "Flower": FlowersOwn,
}
