"""Collect the epsilon that each node reports for a run, and warn of outliers.

Nodes may lie in these reports, so nothing depends on them; the truth is in the node's
ledger.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from logging import WARNING
from statistics import median
from typing import cast

from flwr.app import ConfigRecord, MetricRecord
from flwr.common import log

from flwr_safedshb.algorithm.wire import (
    DELTA,
    EPSILON,
    MOMENTUM_TAG,
    SEEN,
    UNUSABLE,
)
from flwr_safedshb.privacy.accounting.ranges import MAX_EXAMPLES

# Epsilon and delta.
Report = tuple[float, float]
# Metrics of the last round: the nodes that report, and what they report.
NODES, EPSILONS, DELTAS = "stated-nodes", "stated-epsilon", "stated-delta"
# A report above this multiple of the median, or below its inverse, is warned of.
_FAR = 2.0


def read_report(records: Iterable[object]) -> Report | None:
    """Return the epsilon and delta that a reply reports, or None."""
    for record in records:
        if isinstance(record, MetricRecord | ConfigRecord) and MOMENTUM_TAG in record:
            pair = record.get(EPSILON), record.get(DELTA)
            if all(isinstance(n, float | int) for n in pair):
                epsilon, delta = (float(cast(float, number)) for number in pair)
                # Without noise epsilon is infinite; NaN is no report.
                return (epsilon, delta) if epsilon >= 0.0 <= delta < math.inf else None
    return None


def collect_reports(
    replies: Iterable[tuple[int, Iterable[object]]],
) -> dict[str, int | float | list[int] | list[float]]:
    """Return metrics with the epsilon that each node reports; empty if none does.

    Simulated nodes also report how many of their examples cannot be used.

    Parameters
    ----------
    replies : iterable of (node, the records of its reply)
    """
    replies = [(node, list(records)) for node, records in replies]
    found = ((node, read_report(records)) for node, records in replies)
    reports = sorted((node, pair) for node, pair in found if pair is not None)
    counts = _count_examples(records for _, records in replies)
    if not reports:
        return {**counts}
    return {
        **counts,
        NODES: [node for node, _ in reports],
        EPSILONS: [epsilon for _, (epsilon, _) in reports],
        DELTAS: [delta for _, (_, delta) in reports],
    }


def _count_examples(replies: Iterable[Iterable[object]]) -> dict[str, int]:
    """Return how many examples simulated nodes looked at, and how many are unusable."""
    counts = {SEEN: 0, UNUSABLE: 0}
    for records in replies:
        for record in records:
            if isinstance(record, MetricRecord | ConfigRecord) and SEEN in record:
                seen, unusable = record[SEEN], record.get(UNUSABLE)
                if isinstance(seen, int) and isinstance(unusable, int):
                    counts[SEEN] += min(max(seen, 0), MAX_EXAMPLES)
                    counts[UNUSABLE] += min(max(unusable, 0), MAX_EXAMPLES)
    return counts if counts[SEEN] else {}


def warn_of_outliers(metrics: Mapping[str, object]) -> None:
    """Warn of nodes that report an epsilon far from that of most."""
    nodes = cast(list[int], metrics.get(NODES, []))
    epsilons = cast(list[float], metrics.get(EPSILONS, []))
    usual = median(epsilons) if epsilons else 0.0
    for node, epsilon in zip(nodes, epsilons, strict=True):
        if not usual / _FAR <= epsilon <= usual * _FAR:
            log(
                WARNING,
                "Node %d reports epsilon %.4g, far from the median of %.4g",
                node,
                epsilon,
                usual,
            )
