"""What was sent and received, written down beside the product and apart from it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from flwr_safedshb.flower.grid import WrappedGrid


@dataclass(frozen=True)
class Sent:
    """A message of the server: to `node`, with the model, (d,)."""

    id: str
    node: int
    step: int
    session: str
    model: list[float]


@dataclass(frozen=True)
class Received:
    """A reply as it reached the server: an error's text, or all that it holds."""

    to: str
    error: str | None = None
    records: list[str] = field(default_factory=list)
    metrics: dict[str, object] = field(default_factory=dict)
    arrays: dict[str, list[float]] = field(default_factory=dict)


def append_entry(path: Path, entry: Mapping[str, object]) -> None:
    """Append an entry to a JSONL file; it is on disk when this returns."""
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Return all entries of a JSONL file."""
    # What follows the last end of a line is being written, or was cut off by a kill.
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def read_messages(path: Path) -> tuple[list[Sent], list[Received]]:
    """Return what a `TracedGrid` wrote down."""
    entries = read_entries(path)
    return (
        [Sent(**entry) for entry in entries if "id" in entry],
        [Received(**entry) for entry in entries if "to" in entry],
    )


class TracedGrid(WrappedGrid):
    """A Grid that writes down every message and every reply."""

    def __init__(self, grid: Grid, path: Path) -> None:
        super().__init__(grid)
        self.path = path

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages."""
        messages = list(messages)
        ids = list(self.grid.push_messages(messages))
        for message, message_id in zip(messages, ids, strict=True):
            config = message.content.config_records["config"]
            (model,) = message.content.array_records["arrays"].to_numpy_ndarrays()
            sent = {
                "id": message_id,
                "node": message.metadata.dst_node_id,
                "step": config["step"],
                "session": config["session"],
                "model": model.reshape(-1).tolist(),
            }
            append_entry(self.path, sent)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Collect replies."""
        replies = list(self.grid.pull_messages(message_ids))
        for reply in replies:
            append_entry(self.path, asdict(_describe_reply(reply)))
        return replies


def _describe_reply(reply: Message) -> Received:
    to = reply.metadata.reply_to_message_id
    if reply.has_error():
        return Received(to, error=reply.error.reason or str(reply.error.code))
    content = reply.content
    return Received(
        to,
        records=sorted(content),
        metrics={k: dict(v) for k, v in content.metric_records.items()},
        arrays={
            f"{key}/{name}": array.numpy().reshape(-1).tolist()
            for key, record in content.array_records.items()
            for name, array in record.items()
        },
    )
