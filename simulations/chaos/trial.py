"""One training of the federation, over as many submissions as it takes to end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flwr_safedshb.algorithm.budget import LEDGER_NAME
from flwr_safedshb.algorithm.checkpoint import load
from flwr_safedshb.algorithm.progress import Progress
from flwr_safedshb.privacy.ledger.ledger import Ledger
from simulations.chaos.app import CHECKPOINT, LOG, TRACE, Order
from simulations.chaos.problem import Vector
from simulations.chaos.trace import Received, Sent, read_entries, read_messages
from simulations.loopback import Deployment

# Far beyond what anything takes: only a hang is to end here.
PATIENCE_SECONDS = 900.0
WHOLE = 10**9  # characters of a log


@dataclass
class FaultTrial:
    """A run under fault, and what is known of it from outside."""

    federation: Deployment
    folder: Path  # of checkpoint, log and traces; is made
    seed: int
    steps: int
    timeout: float  # seconds the server waits for the replies of a round
    # What a node does in a step, by node and step.
    orders: Mapping[tuple[int, int], Order] = field(default_factory=dict)
    backoff: bool = True  # whether a node that fails again is not asked for a while
    run_id: str = ""

    def submit_run(self) -> None:
        """Start the run, or take it up again from its checkpoint."""
        self.folder.mkdir(exist_ok=True)
        # Flower takes no quotes within an option.
        orders = [f"{n}-{step}:{order}" for (n, step), order in self.orders.items()]
        self.run_id = self.federation.submit(
            {
                "folder": str(self.folder),
                "seed": self.seed,
                "steps": self.steps,
                "timeout": self.timeout,
                "orders": ",".join(orders),
                "backoff": self.backoff,
            }
        )

    def wait_failed(self) -> None:
        """Wait until Flower knows that the run has ended without success."""
        status = self.federation.status
        self.wait(lambda: status(self.run_id).startswith("finish"), pause=2.0)

    def wait_held(self, node: int, step: int) -> None:
        """Wait until the node does as ordered."""
        self.wait((self.folder / f"held-{node}-{step}").exists)

    def let_go(self, node: int, step: int) -> None:
        """Let the node go on, now and if it is asked again."""
        (self.folder / f"go-{node}-{step}").touch()

    def wait_step(self, step: int) -> None:
        """Wait until the server has asked for a step."""
        self.wait(lambda: step in self.read_models())

    def wait_reply(self, node: int, step: int) -> None:
        """Wait until the server has a reply of the node for a step."""
        self.wait(lambda: step in [number for number, _ in self.read_replies(node)])

    def wait_log(self, name: str, words: str, times: int = 1) -> None:
        """Wait until a process of the federation has logged words so often."""
        log = self.federation.log
        self.wait(lambda: log(name, WHOLE).count(words) >= times)

    def wait(self, condition: Callable[[], bool], pause: float = 0.2) -> None:
        """Wait for something to happen.

        Raises
        ------
        TimeoutError
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                end = self.read_log()[-3000:]
                raise TimeoutError(f"nothing in {PATIENCE_SECONDS:g} s:\n{end}")
            time.sleep(pause)

    def wait_end(self) -> None:
        """Wait for the run to end; raise if it has failed."""
        # To ask for the status costs a process; the checkpoint is cheaper to watch.
        self.wait(lambda: self.count_steps() == self.steps)
        self.federation.wait(self.run_id, PATIENCE_SECONDS)

    def restart_nodes(
        self, *nodes: int, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start nodes, and wait until they have joined.

        The gate lets a killed node in again at once. A gate that was killed as well
        knows nothing of it, and leaves it to the SuperLink, which waits for two
        heartbeats; a node tries again.
        """
        log, words = self.federation.log, "SuperNode ID:"
        joined = {node: log(f"node-{node}", WHOLE).count(words) for node in nodes}
        for node in nodes:
            self.federation.start_node(node, environment=environment)
        for node in nodes:
            self.wait_log(f"node-{node}", words, joined[node] + 1)

    def load_progress(self) -> Progress | None:
        """Return the newest checkpoint."""
        return load(self.folder / CHECKPOINT)

    def count_steps(self) -> int:
        """Return the number of steps in the newest checkpoint."""
        progress = self.load_progress()
        return 0 if progress is None else progress.step

    def load_model(self) -> Vector:
        """Return the newest model, (DIMENSION,); infinite where there is none."""
        progress = self.load_progress()
        if progress is None:
            return np.array([np.inf])
        (model,) = progress.arrays.to_numpy_ndarrays()
        return np.asarray(model.reshape(-1), np.float64)

    def read_log(self) -> str:
        """Return what the server app has logged."""
        path = self.folder / LOG
        return path.read_text() if path.exists() else ""

    def read_messages(self) -> tuple[list[Sent], list[Received]]:
        """Return all that the server has sent and received."""
        return read_messages(self.folder / TRACE)

    def read_models(self) -> dict[int, Vector]:
        """Return the model that was sent in each step."""
        sent, _ = self.read_messages()
        return {message.step: np.array(message.model) for message in sent}

    def list_asked(self, node: int) -> list[int]:
        """Return the steps that the server has asked a node for, in order."""
        sent, _ = self.read_messages()
        mine = self.federation.node_ids[node]
        return [message.step for message in sent if message.node == mine]

    def read_replies(self, node: int) -> list[tuple[int, Received]]:
        """Return the steps and replies that the server has of a node, in order."""
        sent, received = self.read_messages()
        mine = self.federation.node_ids[node]
        steps = {message.id: message.step for message in sent if message.node == mine}
        return [(steps[reply.to], reply) for reply in received if reply.to in steps]

    def list_released(self, node: int) -> list[int]:
        """Return the steps for which a node has computed a message.

        A message that was sent again counts once: it was computed once.
        """
        entries = read_entries(self.folder / f"released-{node}.jsonl")
        return [step for step, _ in {(int(e["step"]), e["reply"]): 0 for e in entries}]

    def list_used(self, node: int) -> list[int]:
        """Return the steps in which the server had the node's momentum."""
        return sorted({step for step, r in self.read_replies(node) if r.error is None})

    def find_session(self) -> str:
        """Return the name that the product gave the run."""
        return self.read_messages()[0][0].session

    def count_charges(self, node: int) -> int:
        """Return how many steps of this run the node's ledger holds."""
        with Ledger(self.federation.state_dir(node) / LEDGER_NAME) as ledger:
            return sum(
                c.steps for c in ledger.charges() if c.run == self.find_session()
            )
