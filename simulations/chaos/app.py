"""The app of the federation under fault: the product's server and client, traced.

A run's config holds `orders`: for a node and a step, what the node does then. A node
that is held leaves a file ``held-<node>-<step>`` and goes on once there is a file
``go-<node>-<step>``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Literal, cast
from unittest.mock import patch

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from flwr_safedshb.algorithm import attendance
from flwr_safedshb.algorithm.wire import MOMENTUM_TAG
from flwr_safedshb.flower.compat import set_reply_to
from flwr_safedshb.strategy import SafeDSHB
from simulations.chaos.problem import BETA, DIMENSION, EXAMPLES, HOSTILE, NODES
from simulations.chaos.trace import TracedGrid, append_entry

# Before the charge; between the charge and the data; answer the message before again.
Order = Literal["hold-before", "hold-after", "replay"]

CHECKPOINT, LOG, TRACE = "run.npz", "server.log", "server.jsonl"
# A round begins once all nodes are back, so that each fault stays in its own round.
_NODE_SECONDS = 600.0
# Where a client remembers the newest message and its reply.
_SENT, _ARRAYS = "chaos-sent", "chaos-arrays"

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train with f = 1, from the checkpoint if there is one."""
    folder = Path(str(context.run_config["folder"]))
    # Flower's own copy of this log comes late, and not at all after a kill.
    handler = logging.FileHandler(folder / LOG)
    logging.getLogger("flwr").addHandler(handler)
    strategy = SafeDSHB(
        num_malicious_nodes=1,
        momentum=BETA,
        min_available_nodes=NODES,
        node_timeout=_NODE_SECONDS,
        seed=int(context.run_config["seed"]),
        checkpoint=folder / CHECKPOINT,
    )
    with nullcontext() if context.run_config["backoff"] else without_backoff():
        strategy.start(
            TracedGrid(grid, folder / TRACE),
            initial_model(),
            num_rounds=int(context.run_config["steps"]),
            timeout=float(context.run_config["timeout"]),
        )
    handler.close()


@contextmanager
def without_backoff() -> Iterator[None]:
    """Let nodes that fail be asked in every round: they are to attack in each."""
    with patch.object(attendance, "_MOST_DOUBLINGS", 0):
        yield


def initial_model() -> ArrayRecord:
    """Return the model to start from: zero, two away from the optimum."""
    return ArrayRecord({"weight": Array(np.zeros((DIMENSION, 1), np.float32))})


@client.train()
def train(message: Message, context: Context) -> Message:
    """Take a step as the product does, or as ordered."""
    partition = int(context.node_config["partition-id"])
    step = cast(int, message.content.config_records["config"]["step"])
    if partition == HOSTILE:
        return Message(_make_content(_make_bad_vector(step)), reply_to=message)
    order = read_order(context, step)
    if order == "replay":
        return _replay_message(message, context)
    if order == "hold-before":
        hold(context, step)
    # Costs more than all else here, and the hostile node does without it.
    from simulations.chaos.honest import make_client

    reply = make_client(step)(message, context)
    if folder := str(context.run_config["folder"]):
        # Before the reply leaves: what was computed counts as released.
        arrays = reply.content.array_records["arrays"]
        told = {"step": step, "reply": arrays.object_id}
        append_entry(Path(folder) / f"released-{partition}.jsonl", told)
    context.state[_SENT] = ConfigRecord({"to": message.metadata.message_id})
    context.state[_ARRAYS] = reply.content.array_records["arrays"]
    return reply


def read_order(context: Context, step: int) -> Order | None:
    """Return what the node is told to do in a step."""
    words = str(context.run_config["orders"]).split(",")
    orders = dict(word.split(":") for word in words if word)
    name = f"{context.node_config['partition-id']}-{step}"
    return cast(Order | None, orders.get(name))


def hold(context: Context, step: int) -> None:
    """Wait to be let go."""
    folder = Path(str(context.run_config["folder"]))
    name = f"{context.node_config['partition-id']}-{step}"
    if not (folder / f"go-{name}").exists():
        (folder / f"held-{name}").touch()
    while not (folder / f"go-{name}").exists():
        time.sleep(0.1)


def _make_bad_vector(step: int) -> ArrayRecord:
    """Return a vector that is not finite, one of another shape, or a far one."""
    far = np.full((DIMENSION, 1), 10.0, np.float32)
    kinds = [np.full_like(far, np.nan), far[:1].copy(), far]
    return ArrayRecord({"weight": Array(kinds[step % len(kinds)])})


def _replay_message(message: Message, context: Context) -> Message:
    """Return the reply to the message before, as it was sent then."""
    content = _make_content(context.state.array_records[_ARRAYS])
    reply = Message(content, reply_to=message)
    set_reply_to(reply, str(context.state.config_records[_SENT]["to"]))
    return reply


def _make_content(arrays: ArrayRecord) -> RecordDict:
    metrics = MetricRecord({"num-examples": EXAMPLES, MOMENTUM_TAG: 1})
    return RecordDict({"arrays": arrays, "metrics": metrics})
