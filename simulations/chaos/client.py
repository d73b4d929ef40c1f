"""The nodes of the federation under fault: the product's client, told to misbehave.

A run's config holds `orders`: for a node and a step, what the node does then. A node
that is held leaves a file ``held-<node>-<step>`` and goes on once there is a file
``go-<node>-<step>``.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal, cast

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

from flwr_safedshb.algorithm.wire import MOMENTUM_TAG
from flwr_safedshb.flower.compat import set_reply_to
from simulations.chaos.problem import DIMENSION, EXAMPLES, HOSTILE
from simulations.chaos.trace import note

# Before the charge; between the charge and the data; answer the message before again.
Order = Literal["hold-before", "hold-after", "replay"]

# Where a client remembers the newest message and its reply.
_SENT, _ARRAYS = "chaos-sent", "chaos-arrays"

client = ClientApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """Take a step as the product does, or as ordered."""
    partition = int(context.node_config["partition-id"])
    step = cast(int, message.content.config_records["config"]["step"])
    if partition == HOSTILE:
        return Message(_content(_spoilt(step)), reply_to=message)
    told = order(context, step)
    if told == "replay":
        return _replayed(message, context)
    if told == "hold-before":
        hold(context, step)
    # Costs more than all else here, and the hostile node does without it.
    from simulations.chaos.honest import honest

    reply = honest(step)(message, context)
    if folder := str(context.run_config["folder"]):
        # Before the reply leaves: what was computed counts as released.
        note(Path(folder) / f"released-{partition}.jsonl", {"step": step})
    context.state[_SENT] = ConfigRecord({"to": message.metadata.message_id})
    context.state[_ARRAYS] = reply.content.array_records["arrays"]
    return reply


def order(context: Context, step: int) -> Order | None:
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


def _spoilt(step: int) -> ArrayRecord:
    """Return a vector that is not finite, one of another shape, or a far one."""
    far = np.full((DIMENSION, 1), 10.0, np.float32)
    kinds = [np.full_like(far, np.nan), far[:1].copy(), far]
    return ArrayRecord({"weight": Array(kinds[step % len(kinds)])})


def _replayed(message: Message, context: Context) -> Message:
    """Return the reply to the message before, as it was sent then."""
    content = _content(context.state.array_records[_ARRAYS])
    reply = Message(content, reply_to=message)
    before = context.state.config_records[_SENT]["to"]
    set_reply_to(reply, str(before))
    return reply


def _content(arrays: ArrayRecord) -> RecordDict:
    metrics = MetricRecord({"num-examples": EXAMPLES, MOMENTUM_TAG: 1})
    return RecordDict({"arrays": arrays, "metrics": metrics})
