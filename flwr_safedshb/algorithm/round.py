"""The server's half of a round (Algorithm 1, lines 9 and 10), as one pure function.

`aggregate_round` takes what was sent and what came back, and returns the next model and
the metrics of the round. It changes nothing but the record of a run with receipts, so
it can be called alone, in a test or in a strategy of one's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import WARNING
from typing import TYPE_CHECKING, cast

import numpy as np
from flwr.common import log

from flwr_safedshb.aggregation.rule import Rule, Weighing
from flwr_safedshb.algorithm.attendance import FAILING_NODES, Attendance
from flwr_safedshb.algorithm.heterogeneity import estimate_heterogeneity
from flwr_safedshb.algorithm.outliers import count_outliers, warn_of_outliers
from flwr_safedshb.algorithm.privacy_report import collect_reports
from flwr_safedshb.algorithm.screening import (
    ForeignClientsError,
    ScreeningResult,
    screen_replies,
)
from flwr_safedshb.algorithm.wire import Template, apply_update
from flwr_safedshb.theory import kappa_spectral

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Message

    from flwr_safedshb.algorithm.receipt_book import ReceiptPage

Metrics = dict[str, int | float | list[int] | list[float]]
# The bound on the norm of an honest reply, and the rounds so far without a step.
NORM_BOUND, SKIPPED_ROUNDS = "norm-bound", "skipped-rounds"
# How many replies lie far from the others.
OUTLIERS = "outliers"
# Followed by a reason: the nodes that were excluded for it.
EXCLUDED_NODES = "nodes-"


@dataclass(frozen=True)
class SentRound:
    """What the server sent in a round, and what it expects of the replies.

    Attributes
    ----------
    arrays : ArrayRecord
        theta_t.
    template : Template
    messages : list of Message
        As they were sent, one to each node.
    num_malicious : int
        f among these nodes.
    learning_rate, momentum : float
        gamma_t, and the beta that the clients use.
    noise_std : float, optional
        Deviation of the noise in an honest momentum, if it is known.
    foreign_clients : bool
        Whether replies without the momentum tag are accepted.
    local_steps : int
        K; a reply is the mean of K momentums.
    report_privacy : bool
        Whether nodes were asked to report what the run costs them.
    norm_bound : float
        The largest L2 norm of an honest reply; infinite if it is unknown.
    number : int
        The number of the round, from 1 on.
    before : mapping
        The metrics of the round before: which nodes failed, and how many rounds were
        skipped.
    receipts : ReceiptPage, optional
        Where the run is recorded: replies without a receipt in order are excluded.
    """

    arrays: ArrayRecord
    template: Template
    messages: list[Message]
    num_malicious: int
    learning_rate: float
    momentum: float
    noise_std: float | None = None
    foreign_clients: bool = False
    local_steps: int = 1
    report_privacy: bool = False
    norm_bound: float = math.inf
    number: int = 1
    before: Mapping[str, object] = field(default_factory=dict)
    receipts: ReceiptPage | None = None


def aggregate_round(
    sent: SentRound, rule: Rule, replies: Iterable[Message]
) -> tuple[ArrayRecord | None, Metrics]:
    """Screen and aggregate momentums, and take a step (Alg. 1, lines 9 and 10).

    An honest node may fail or be late, so only a reply excluded for its content lowers
    f. If n' <= 2f' no rule can help and the round is skipped. No reply of f adversaries
    makes it raise.

    Returns
    -------
    arrays : ArrayRecord or None
        theta_{t+1}; None if the round is skipped and theta_t stays.
    metrics : dict
        ``replies`` (n'), ``excluded``, ``excluded-<reason>`` and the nodes that these
        are, ``nodes-<reason>``, ``ignored``,
        ``num-malicious-nodes`` (f'), ``skipped``, ``skipped-rounds`` (so far),
        ``learning-rate``, ``momentum``, ``norm-bound`` where one is known, and
        ``failing-nodes`` with their failures, answers in a row since, and the round in
        which they are asked again. Where the rule computes them, ``kappa`` (certified
        for this very answer where the rule does that), ``kappa-spectral`` (of a rule
        proven in the variance sense), ``kappa-paper`` (the constant that the paper
        states), ``lambda-max``, and ``left-out``, the nodes that have no part in R_t.
        ``outliers``, how many replies lie far from the others: those adversaries that
        do not hide. Where the noise is known, ``heterogeneity-estimate`` and
        ``heterogeneity-spectral-estimate``: how far the selected momentums differ, G
        and Gcov, with the noise subtracted. Adversaries can influence these estimates.

    Raises
    ------
    ForeignClientsError
        If more than f replies have no momentum tag.
    """
    screened = screen_replies(
        sent.template,
        sent.messages,
        replies,
        sent.foreign_clients,
        sent.norm_bound,
        None if sent.receipts is None else sent.receipts.accepts,
    )
    if (untagged := screened.excluded["unmarked"]) > sent.num_malicious:
        raise ForeignClientsError(untagged, sent.num_malicious)
    f = _remaining_adversaries(sent.num_malicious, screened)
    left = len(screened.accepted)
    arrays, found, weighing = None, Metrics(), None
    if left > 2 * f:
        arrays, found, weighing = _take_step(sent, rule, f, screened)
    else:
        log(
            WARNING,
            "Round skipped: %d replies are left and up to %d of them are adversarial",
            left,
            f,
        )
    if sent.receipts is not None:
        rate, skipped = sent.learning_rate, arrays is None
        sent.receipts.record(screened.accepted, f, weighing, rate, skipped)
    skipped_before = cast(int, sent.before.get(SKIPPED_ROUNDS, 0))
    metrics: Metrics = {
        "replies": left,
        "excluded": screened.excluded.total(),
        "ignored": screened.ignored,
        "num-malicious-nodes": f,
        "skipped": int(arrays is None),
        SKIPPED_ROUNDS: skipped_before + int(arrays is None),
        **{f"excluded-{r}": n for r, n in sorted(screened.excluded.items())},
        **{
            f"{EXCLUDED_NODES}{reason}": sorted(
                node for node, why in screened.reasons.items() if why == reason
            )
            for reason in sorted(screened.excluded)
        },
        **found,
    }
    if sent.report_privacy:
        metrics |= collect_reports((n, reply.records) for n, reply in screened.accepted)
    metrics |= {"learning-rate": sent.learning_rate, "momentum": sent.momentum}
    if sent.norm_bound < math.inf:
        metrics[NORM_BOUND] = sent.norm_bound
    if screened.failed or FAILING_NODES in sent.before:
        asked = [message.metadata.dst_node_id for message in sent.messages]
        before = Attendance.from_metrics(sent.before)
        metrics |= before.after_round(sent.number, asked, screened.failed).to_metrics()
    return arrays, metrics


def _take_step(
    sent: SentRound, rule: Rule, f: int, screened: ScreeningResult
) -> tuple[ArrayRecord | None, Metrics, Weighing | None]:
    """Aggregate the momentums and return theta_{t+1}, or None if that fails."""
    nodes, replies = zip(*screened.accepted, strict=True)
    momentums = [reply.layers for reply in replies]
    try:
        direction, weighing = rule.aggregate(momentums, f)  # line 9
    except (ValueError, ArithmeticError) as error:
        # A rule may need more than n > 2f, or fail on what adversaries made up.
        log(WARNING, "Round skipped: the rule failed: %s", error)
        return None, {}, None
    metrics = _rule_metrics(rule, f, nodes, weighing)
    metrics[OUTLIERS] = outliers = count_outliers(momentums, direction)
    warn_of_outliers(outliers, f, cast(int, sent.before.get(OUTLIERS, 0)))
    if weighing is not None and sent.noise_std is not None:
        metrics |= estimate_heterogeneity(
            momentums, direction, weighing, sent.noise_std
        )
    rate = sent.local_steps * sent.learning_rate
    arrays = apply_update(sent.arrays, direction, rate)  # line 10
    if arrays is None:
        log(WARNING, "Round skipped: the step would leave the range of numbers")
    return arrays, metrics, weighing


def _remaining_adversaries(f: int, screened: ScreeningResult) -> int:
    """Return f': f minus the senders whose replies prove that they are adversaries."""
    if screened.proven_adversaries > f:
        log(
            WARNING,
            "%d replies prove an adversary and num_malicious_nodes is %d: the "
            "assumption that everything rests on is broken, or honest clients hold "
            "another model",
            screened.proven_adversaries,
            f,
        )
    return max(f - screened.proven_adversaries, 0)


def _rule_metrics(
    rule: Rule, f: int, nodes: Sequence[int], weighing: Weighing | None
) -> Metrics:
    """Return the constants of a rule, and which nodes it left out."""
    metrics: Metrics = {}
    kappa = None if weighing is None else weighing.kappa
    if kappa is None:
        kappa = rule.kappa(len(nodes), f)
    if weighing is not None:
        metrics["lambda-max"] = float(weighing.lambda_max)
        left_out = np.flatnonzero(weighing.weights == 0.0)
        metrics["left-out"] = sorted(nodes[int(i)] for i in left_out)
    if kappa is not None and kappa < np.inf:
        metrics["kappa"] = float(kappa)
        if rule.kappa_kind == "variance":
            metrics["kappa-spectral"] = kappa_spectral(kappa, len(nodes), f)
    paper = rule.paper_kappa(len(nodes), f)
    if paper is not None:
        metrics["kappa-paper"] = float(paper)
    return metrics
