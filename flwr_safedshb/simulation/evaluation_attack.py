"""What adversaries answer who are asked what a model is worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from flwr.app import Message, MetricRecord, RecordDict

from flwr_safedshb.algorithm.wire import (
    CLASS_CORRECT,
    CORRECT,
    LOSS,
    NUM_EXAMPLES,
    PRIVATE_EVALUATION,
)


def asks_for_counts(message: Message) -> bool:
    """Say whether a node is to answer privately what a model is worth."""
    return any(
        PRIVATE_EVALUATION in record
        for record in message.content.config_records.values()
    )


def lie_like(replies: Sequence[Message]) -> RecordDict | None:
    """Return that nothing is right, in the form of honest replies; None without any."""
    honest = [r for r in replies if r.has_content() and r.content.metric_records]
    if not honest:
        return None
    key, record = next(iter(honest[0].content.metric_records.items()))
    told = MetricRecord(dict(record))
    told[CORRECT] = 0.0
    told[LOSS] = float(cast(int, record[NUM_EXAMPLES]))
    if CLASS_CORRECT in record:
        told[CLASS_CORRECT] = [0.0 for _ in cast(list[float], record[CLASS_CORRECT])]
    return RecordDict({key: told})
