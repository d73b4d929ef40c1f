"""What an attack of the insider has to work with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from flwr_safedshb.node.flower_patches.fleet_api import (
    PackedMessage,
    pack_message,
)
from simulations.chaos.hostile.speaker import Speaker
from simulations.chaos.problem import DIMENSION, EXAMPLES


@dataclass(frozen=True)
class Scene:
    """One round: the node, what it was asked, and what it knows of others."""

    node: Speaker
    asked: Message
    others: list[int]
    trace: Path

    def reply(self, value: float = 1.0, **changes: object) -> PackedMessage:
        """Return a reply with the vector of an adversary."""
        vector = np.full((DIMENSION, 1), value, np.float32)
        content = RecordDict(
            {
                "arrays": ArrayRecord({"weight": Array(vector)}),
                "metrics": MetricRecord({"num-examples": EXAMPLES}),
            }
        )
        return pack_message(Message(content, reply_to=self.asked), **changes)


Attack = Callable[[Scene], str]


def counted(words: Iterable[str]) -> str:
    """Return words with how often each was said."""
    found = Counter(words)
    return ", ".join(f"{count} x {word}" for word, count in found.most_common())
