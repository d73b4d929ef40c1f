"""Fake an adversarial node's answer to a private evaluation."""

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


def asks_for_private_evaluation(message: Message) -> bool:
    """Return whether a message asks for a private evaluation."""
    return any(
        PRIVATE_EVALUATION in record
        for record in message.content.config_records.values()
    )


def fake_evaluation(replies: Sequence[Message]) -> RecordDict | None:
    """Return a reply with no right answers, shaped like the first honest reply.

    None if there is no honest reply.
    """
    honest = [r for r in replies if r.has_content() and r.content.metric_records]
    if not honest:
        return None
    key, record = next(iter(honest[0].content.metric_records.items()))
    fake = MetricRecord(dict(record))
    fake[CORRECT] = 0.0
    fake[LOSS] = float(cast(int, record[NUM_EXAMPLES]))
    if CLASS_CORRECT in record:
        fake[CLASS_CORRECT] = [0.0 for _ in cast(list[float], record[CLASS_CORRECT])]
    return RecordDict({key: fake})
