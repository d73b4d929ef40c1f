"""Collect and log the epsilon that each node reports for a run.

Nodes may lie in these reports, so nothing depends on them; the truth is in the node's
ledger.
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
            if all(isinstance(n, float | int) and math.isfinite(n) for n in pair):
                epsilon, delta = (float(cast(float, number)) for number in pair)
                return (epsilon, delta) if epsilon >= 0.0 <= delta else None
    return None


def collect_reports(
    replies: Iterable[tuple[int, Iterable[object]]],
) -> dict[str, list[int] | list[float]]:
    """Return metrics with the epsilon that each node reports; empty if none does.

    Parameters
    ----------
    replies : iterable of (node, the records of its reply)
    """
    found = ((node, read_report(records)) for node, records in replies)
    reports = sorted((node, pair) for node, pair in found if pair is not None)
    if not reports:
        return {}
    return {
        NODES: [node for node, _ in reports],
        EPSILONS: [epsilon for _, (epsilon, _) in reports],
        DELTAS: [delta for _, (_, delta) in reports],
    }


def log_privacy(metrics: Mapping[str, object], plain_evaluation: bool = False) -> None:
    """Log the privacy cost of a run at its end, and warn of outliers among the nodes.

    Parameters
    ----------
    metrics : mapping
        The metrics of the last round.
    plain_evaluation : bool
        Whether nodes were asked to evaluate without noise, which no report covers.
    """
    if NODES not in metrics:
        return
    nodes = cast(list[int], metrics[NODES])
    epsilons = cast(list[float], metrics[EPSILONS])
    deltas = cast(list[float], metrics[DELTAS])
    log(
        INFO,
        "Privacy, as %d nodes report it, for one example or person as their plans say: "
        "epsilon from %.4g to %.4g, delta up to %.4g%s",
        len(nodes),
        min(epsilons),
        max(epsilons),
        max(deltas),
        "; evaluations without noise are NOT covered" * plain_evaluation,
    )
    usual = median(epsilons)
    for node, epsilon in zip(nodes, epsilons, strict=True):
        if not usual / _FAR <= epsilon <= usual * _FAR:
            log(
                WARNING,
                "Node %d reports epsilon %.4g, far from the median of %.4g",
                node,
                epsilon,
                usual,
            )
