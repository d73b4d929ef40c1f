"""What nodes report about a model that they evaluated on their own data.

They may lie: random ones are asked, at least 2f + 1 of them, and of each number that
enough of them report the median counts.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from logging import WARNING
from statistics import median

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common import log

from flwr_safedshb.flower.compat import is_reply_to


def evaluation_content(
    arrays: ArrayRecord, config: ConfigRecord, arrays_key: str, config_key: str
) -> RecordDict:
    """Return what nodes are sent, under the keys that they train with."""
    # Objects have the hash of their bytes for a name: nobody can guess it.
    config = ConfigRecord({**config, "nonce": secrets.token_hex(8)})
    # A NumPyClient expects other keys here; for others they stay as they are.
    names = (k.replace("fitins.", "evaluateins.") for k in (arrays_key, config_key))
    return RecordDict(dict(zip(names, (arrays, config), strict=True)))


def least_evaluators(asked: int | None, num_malicious: int) -> int:
    """Return the least number of nodes to ask, 2f + 1 unless more are asked for.

    Raises
    ------
    ValueError
        If they are too few for a median that f liars do not decide.
    """
    least = 2 * num_malicious + 1
    if asked is not None and asked < least:
        raise ValueError(
            f"min_evaluate_nodes={asked} must be at least 2f + 1 = {least} for "
            f"num_malicious_nodes={num_malicious}: of fewer, liars decide the median"
        )
    return least if asked is None else asked


def chosen(
    nodes: Sequence[int], fraction: float, least: int, rng: np.random.Generator
) -> list[int]:
    """Return random nodes to ask, sorted; none where too few are there."""
    if len(nodes) < least:
        log(WARNING, "Evaluation left out: %d nodes, %d needed", len(nodes), least)
        return []
    size = max(int(len(nodes) * fraction), least)
    return sorted(nodes[i] for i in rng.choice(len(nodes), size, replace=False))


def medians(
    replies: Iterable[Message],
    num_malicious: int = 0,
    asked: Sequence[Message] | None = None,
) -> dict[str, float]:
    """Return the median over the nodes of each number they report; none is trusted.

    Parameters
    ----------
    replies : iterable of Message
    num_malicious : int
        f: what not more than 2f nodes report is left out.
    asked : sequence of Message, optional
        What was sent; other replies, and second ones, do not count.
    """
    reported: dict[str, list[float]] = {}
    for reply in replies if asked is None else _first(replies, asked):
        for name, number in _numbers(reply).items():
            reported.setdefault(name, []).append(number)
    known = {k: median(v) for k, v in reported.items() if len(v) > 2 * num_malicious}
    if reported and not known:
        log(WARNING, "Evaluation left out: too few nodes answered for a safe median")
    return known


def _first(replies: Iterable[Message], asked: Sequence[Message]) -> Iterator[Message]:
    waiting = {m.metadata.message_id: m.metadata.dst_node_id for m in asked}
    for reply in replies:
        name = reply.metadata.reply_to_message_id
        node = waiting.get(name)
        if node is not None and is_reply_to(reply, name, node):
            del waiting[name]
            yield reply


def _numbers(reply: Message) -> dict[str, float]:
    """Return the finite numbers of a reply, each under one name.

    A NumPyClient has its metrics in a ConfigRecord, beside one that is its status.
    """
    found: dict[str, float] = {}
    # As in screening, no reply makes this raise.
    with suppress(Exception):
        for key, record in reply.content.items():
            if isinstance(record, ArrayRecord) or key.endswith(".status"):
                continue
            for name, value in record.items():
                if isinstance(value, bool | int | float):
                    with suppress(OverflowError):
                        found.setdefault(name, float(value))
    return {name: number for name, number in found.items() if math.isfinite(number)}
