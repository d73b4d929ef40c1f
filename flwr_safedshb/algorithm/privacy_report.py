"""What nodes say that a run costs their examples, for people to read.

It is each node's own word: nothing depends on it, and the truth is in its ledger.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from logging import INFO, WARNING
from statistics import median
from typing import cast

from flwr.app import ConfigRecord, MetricRecord
from flwr.common import log

from flwr_safedshb.algorithm.wire import DELTA, EPSILON, MOMENTUM_TAG

# Epsilon and delta.
Statement = tuple[float, float]
# Metrics of the last round: nodes that state something, and what.
NODES, EPSILONS, DELTAS = "stated-nodes", "stated-epsilon", "stated-delta"
# How many times the median, or how small a part of it, is far from the others.
_FAR = 2.0


def stated(records: Iterable[object]) -> Statement | None:
    """Return what a reply states; None where it does not, or makes no sense."""
    for record in records:
        if isinstance(record, MetricRecord | ConfigRecord) and MOMENTUM_TAG in record:
            pair = record.get(EPSILON), record.get(DELTA)
            if all(isinstance(n, float | int) and math.isfinite(n) for n in pair):
                epsilon, delta = (float(cast(float, number)) for number in pair)
                return (epsilon, delta) if epsilon >= 0.0 <= delta else None
    return None


def statements(
    said: Iterable[tuple[int, Iterable[object]]],
) -> dict[str, list[int] | list[float]]:
    """Return the metrics of nodes that state something; nothing if none does.

    Parameters
    ----------
    said : iterable of (node, the records of its reply)
    """
    all_said = ((node, stated(records)) for node, records in said)
    told = sorted((node, pair) for node, pair in all_said if pair is not None)
    if not told:
        return {}
    return {
        NODES: [node for node, _ in told],
        EPSILONS: [epsilon for _, (epsilon, _) in told],
        DELTAS: [delta for _, (_, delta) in told],
    }


def log_privacy(metrics: Mapping[str, object], plain_evaluation: bool = False) -> None:
    """Say at the end of a run what it costs, and name the nodes that stand out.

    Parameters
    ----------
    metrics : mapping
        Of the last round.
    plain_evaluation : bool
        Whether nodes were asked to evaluate without noise, which no statement covers.
    """
    if NODES not in metrics:
        return
    nodes = cast(list[int], metrics[NODES])
    epsilons = cast(list[float], metrics[EPSILONS])
    deltas = cast(list[float], metrics[DELTAS])
    log(
        INFO,
        "Privacy, as %d nodes state it: epsilon from %.4g to %.4g, delta up to %.4g%s",
        len(nodes),
        min(epsilons),
        max(epsilons),
        max(deltas),
        "; what they evaluated without noise is NOT covered" * plain_evaluation,
    )
    usual = median(epsilons)
    for node, epsilon in zip(nodes, epsilons, strict=True):
        if not usual / _FAR <= epsilon <= usual * _FAR:
            log(
                WARNING,
                "Node %d states epsilon %.4g, far from the median of %.4g",
                node,
                epsilon,
                usual,
            )
