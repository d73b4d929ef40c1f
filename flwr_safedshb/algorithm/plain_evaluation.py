"""Evaluate on the nodes without noise, and return medians of what they report.

Nodes may lie, so at least 2f + 1 random nodes are asked, and a metric counts only if
more than 2f nodes report it.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from logging import WARNING
from statistics import median

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common import log

from flwr_safedshb.algorithm.screening import match_replies


def make_evaluation_content(
    arrays: ArrayRecord, config: ConfigRecord, arrays_key: str, config_key: str
) -> RecordDict:
    """Return the records of an evaluation message, under the keys of training."""
    # Objects are named by the hash of their bytes; the nonce makes it unpredictable.
    config = ConfigRecord({**config, "nonce": secrets.token_hex(8)})
    # NumPyClients expect other keys in evaluation messages; other keys stay.
    names = (k.replace("fitins.", "evaluateins.") for k in (arrays_key, config_key))
    return RecordDict(dict(zip(names, (arrays, config), strict=True)))


def check_min_evaluators(min_nodes: int | None, num_malicious: int) -> int:
    """Return the least number of nodes to ask, by default 2f + 1.

    Raises
    ------
    ValueError
        If f liars could determine the median of so few nodes.
    """
    least = 2 * num_malicious + 1
    if min_nodes is not None and min_nodes < least:
        raise ValueError(
            f"min_evaluate_nodes={min_nodes} must be at least 2f + 1 = {least} for "
            f"num_malicious_nodes={num_malicious}: of fewer, liars determine the median"
        )
    return least if min_nodes is None else min_nodes


def draw_evaluators(
    nodes: Sequence[int], fraction: float, least: int, rng: np.random.Generator
) -> list[int]:
    """Draw the nodes that evaluate the model, sorted; none if too few are there."""
    if len(nodes) < least:
        log(
            WARNING,
            "Evaluation skipped: %d nodes are connected, %d are needed",
            len(nodes),
            least,
        )
        return []
    size = max(int(len(nodes) * fraction), least)
    return sorted(nodes[i] for i in rng.choice(len(nodes), size, replace=False))


def compute_medians(
    replies: Iterable[Message],
    num_malicious: int = 0,
    sent: Sequence[Message] | None = None,
) -> dict[str, float]:
    """Return the median over the nodes of each metric that enough of them report.

    Parameters
    ----------
    replies : iterable of Message
    num_malicious : int
        f; a metric that at most 2f nodes report is dropped.
    sent : sequence of Message, optional
        The messages; only the first reply to each counts.
    """
    reported: dict[str, list[float]] = {}
    if sent is not None:
        answered, _, _ = match_replies(sent, replies)
        replies = [reply for _, reply in answered]
    for reply in replies:
        for name, number in _read_numbers(reply).items():
            reported.setdefault(name, []).append(number)
    known = {k: median(v) for k, v in reported.items() if len(v) > 2 * num_malicious}
    if reported and not known:
        log(WARNING, "Evaluation skipped: too few nodes answered for a robust median")
    return known


def _read_numbers(reply: Message) -> dict[str, float]:
    """Return the finite metrics of a reply by name.

    A NumPyClient sends its metrics in one ConfigRecord and its status in another.
    """
    found: dict[str, float] = {}
    # As in screening, no reply makes this raise an exception.
    with suppress(Exception):
        for key, record in reply.content.items():
            if isinstance(record, ArrayRecord) or key.endswith(".status"):
                continue
            for name, value in record.items():
                if isinstance(value, bool | int | float):
                    with suppress(OverflowError):
                        found.setdefault(name, float(value))
    return {name: number for name, number in found.items() if math.isfinite(number)}
