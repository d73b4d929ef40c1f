"""What nodes report about a model that they evaluated on their own data."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from statistics import median

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict


def evaluation_content(
    arrays: ArrayRecord, config: ConfigRecord, arrays_key: str, config_key: str
) -> RecordDict:
    """Return what nodes are sent, under the keys that they train with."""
    # A NumPyClient expects other keys here; for others they stay as they are.
    names = (k.replace("fitins.", "evaluateins.") for k in (arrays_key, config_key))
    return RecordDict(dict(zip(names, (arrays, config), strict=True)))


def medians(replies: Iterable[Message]) -> dict[str, float]:
    """Return the median over the nodes of each number they report; none is trusted."""
    reported: dict[str, list[float]] = {}
    for reply in replies:
        # As in screening, no reply makes this raise.
        with suppress(Exception):
            for record in reply.content.metric_records.values():
                for name, value in record.items():
                    number = math.nan if isinstance(value, list) else float(value)
                    if math.isfinite(number):
                        reported.setdefault(name, []).append(number)
    return {name: median(numbers) for name, numbers in reported.items()}
