"""One round as the server sees it: from replies to R_t and to the next model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from logging import INFO, WARNING
from statistics import median

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.supercore import log
from numpy.typing import NDArray

from flwr_safedshb.aggregation.rule import Rule, Weighing
from flwr_safedshb.flower import codec
from flwr_safedshb.flower.compat import refilled
from flwr_safedshb.server.screening import Accepted, Excluded, Reason, Template

# Of a node's own words in the log.
_MAX_WORDS = 300

Floats = NDArray[np.floating]
Metrics = dict[str, int | float | list[int] | list[float]]


@dataclass(frozen=True)
class Outcome:
    """What came of a round.

    Attributes
    ----------
    direction : list of arrays, or None
        R_t in the model's shapes; None if the round is skipped.
    metrics : dict
        ``replies`` (n'), ``excluded`` and ``excluded-<reason>``,
        ``num-malicious-nodes`` (f'), ``skipped``; and where the rule tells them
        ``kappa``, ``lambda-max`` and ``left-out``, the nodes that have no part in R_t.
    """

    direction: list[Floats] | None
    metrics: Metrics


@dataclass(frozen=True)
class Screened:
    """Replies that passed, and how many did not, by reason."""

    accepted: list[tuple[int, Accepted]]
    excluded: Counter[Reason]

    @property
    def proven(self) -> int:
        """How many replies only an adversary sends."""
        return sum(
            count
            for reason, count in self.excluded.items()
            if Excluded(reason).is_proof
        )


def screen_all(
    template: Template, sent: Mapping[str, int], replies: Iterable[Message]
) -> Screened:
    """Screen the replies to messages whose ids and nodes are `sent`.

    What passes is ordered by content: node ids and the order of arrival are accidents
    of an engine, and rounding in a sum depends on its order.
    """
    waiting = dict(sent)
    accepted: list[tuple[int, Accepted]] = []
    excluded: Counter[Reason] = Counter()
    for reply in replies:
        # A reply that says a node was lost does not come from that node.
        node = waiting.pop(reply.metadata.reply_to_message_id, None)
        if node is None:
            log(WARNING, "\t> A reply to nothing that was sent in this round: ignored")
            continue
        result = template.screen(reply)
        if isinstance(result, Accepted):
            accepted.append((node, result))
            continue
        excluded[result.reason] += 1
        log(INFO, "\t> Node %d is excluded: %s%s", node, result.reason, _told(reply))
    if waiting:
        excluded["missing"] = len(waiting)
        log(INFO, "\t> No reply from %s", ", ".join(map(str, waiting.values())))
    accepted.sort(key=lambda pair: pair[1].encoded)
    return Screened(accepted, excluded)


def _told(reply: Message) -> str:
    """Return the words of a node that refuses or fails, fit for one line of a log."""
    words = getattr(reply.error, "reason", "") if reply.has_error() else ""
    if not isinstance(words, str) or not words:
        return ""
    # The node may be hostile, and a terminal obeys some characters.
    plain = "".join(c if c.isprintable() else " " for c in words[:_MAX_WORDS])
    return f": {plain}{'...' if len(words) > _MAX_WORDS else ''}"


def conclude(rule: Rule, f: int, screened: Screened) -> Outcome:
    """Aggregate what passed, with f' = f less those who proved to be adversaries.

    An honest node may fail or be late, so only a reply excluded for its content lowers
    f. If n' <= 2f' no rule can help and the round is skipped.
    """
    if screened.proven > f:
        log(
            WARNING,
            "%d replies prove an adversary and num_malicious_nodes is %d: the "
            "assumption that everything rests on is broken, or honest clients hold "
            "another model",
            screened.proven,
            f,
        )
    remaining = max(f - screened.proven, 0)
    replies = len(screened.accepted)
    metrics: Metrics = {
        "replies": replies,
        "excluded": screened.excluded.total(),
        "num-malicious-nodes": remaining,
        "skipped": 0,
    }
    for reason, count in sorted(screened.excluded.items()):
        metrics[f"excluded-{reason}"] = count
    if replies <= 2 * remaining:
        log(
            WARNING,
            "Round skipped: %d replies are left and up to %d of them are adversarial",
            replies,
            remaining,
        )
        return Outcome(None, {**metrics, "skipped": 1})
    try:
        direction, weighing = rule.aggregate(
            [result.layers for _, result in screened.accepted], remaining
        )
    except (ValueError, ArithmeticError) as error:
        # A rule may need more than n > 2f, or not survive what adversaries made up.
        log(WARNING, "Round skipped: the rule failed: %s", error)
        return Outcome(None, {**metrics, "skipped": 1})
    nodes = [node for node, _ in screened.accepted]
    return Outcome(
        direction, {**metrics, **_findings(rule, remaining, nodes, weighing)}
    )


def stepped(
    arrays: ArrayRecord, direction: list[Floats], rate: float
) -> ArrayRecord | None:
    """Theta - rate * R in float64, in the dtypes of theta; None if not finite."""
    result = {}
    for (name, array), layer in zip(arrays.items(), direction, strict=True):
        old = codec.decode(array)
        with np.errstate(over="ignore", invalid="ignore"):
            new = old.astype(np.float64) - rate * layer.astype(np.float64)
            new = new.astype(old.dtype)
        if not np.isfinite(new).all():
            return None
        result[name] = codec.encode(new)
    return refilled(arrays, result)


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


def _findings(
    rule: Rule, f: int, nodes: list[int], weighing: Weighing | None
) -> Metrics:
    findings: Metrics = {}
    kappa = rule.kappa(len(nodes), f)
    if weighing is not None:
        kappa = kappa if weighing.kappa is None else weighing.kappa
        findings["lambda-max"] = float(weighing.lambda_max)
        left_out = np.flatnonzero(weighing.weights == 0.0)
        findings["left-out"] = sorted(nodes[i] for i in left_out)
    if kappa is not None:
        findings["kappa"] = float(kappa)
    return findings
