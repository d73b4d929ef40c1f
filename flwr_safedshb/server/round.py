"""One round as the server takes it: from replies to R_t and to the next model.

`conclude` reads like the server's half of Algorithm 1: screen what came, find how many
adversaries may be left, aggregate, take a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from logging import WARNING

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.common import log
from numpy.typing import NDArray

from flwr_safedshb.aggregation.rule import Rule, Weighing
from flwr_safedshb.exchange.arrays import Template, read, stepped, written
from flwr_safedshb.server.screening import Screened, screen_all
from flwr_safedshb.server.statements import statements
from flwr_safedshb.theory import heterogeneity_estimate, kappa_spectral

Floats = NDArray[np.floating]
Metrics = dict[str, int | float | list[int] | list[float]]


@dataclass(frozen=True)
class Round:
    """What was sent in a round.

    Attributes
    ----------
    arrays : ArrayRecord
        theta_t.
    template : Template
        Of the arrays.
    messages : list of Message
        As they were sent, one to each node.
    num_malicious : int
        f among these nodes.
    learning_rate, momentum : float
        gamma_t, and the beta that the clients use.
    noise_std : float, optional
        Deviation of the noise in an honest momentum, if it is known.
    foreign_clients : bool
        Whether replies need no mark of our clients.
    local_steps : int
        K, how many steps a momentum is the mean of.
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


class ForeignClientsError(RuntimeError):
    """Most clients of a run send something else than momentums."""


@dataclass(frozen=True)
class Outcome:
    """What came of a round.

    Attributes
    ----------
    arrays : ArrayRecord or None
        theta_{t+1}; None if the round is skipped and theta_t stays.
    metrics : dict
        ``replies`` (n'), ``excluded`` and ``excluded-<reason>``, ``ignored``,
        ``num-malicious-nodes`` (f'), ``skipped``, ``learning-rate``, ``momentum``; and
        where the rule tells them ``kappa``, certified for this very answer where the
        rule does that, ``kappa-spectral`` (of a rule proven in the variance sense),
        ``kappa-paper`` (the constant that the paper states), ``lambda-max`` and
        ``left-out``, the nodes that have no part in R_t. Where the noise is known also
        ``heterogeneity-estimate`` and ``heterogeneity-spectral-estimate``: how far the
        momentums that count differ, G and Gcov, with the noise taken off. Estimates,
        which adversaries can feign.
    """

    arrays: ArrayRecord | None
    metrics: Metrics


def conclude(sent: Round, rule: Rule, replies: Iterable[Message]) -> Outcome:
    """Screen and aggregate momentums, and take a step (Alg. 1, lines 9 and 10).

    An honest node may fail or be late, so only a reply excluded for its content lowers
    f. If n' <= 2f' no rule can help and the round is skipped. No reply of f adversaries
    makes it raise.

    Raises
    ------
    ForeignClientsError
        If more clients than can be adversaries send vectors that are no momentums.
    """
    ids = {m.metadata.message_id: m.metadata.dst_node_id for m in sent.messages}
    screened = screen_all(sent.template, ids, replies, sent.foreign_clients)
    if (strange := screened.excluded["unmarked"]) > sent.num_malicious:
        raise ForeignClientsError(
            f"{strange} replies are no momentums of a SafeDSHBClient, and at most "
            f"{sent.num_malicious} can be of adversaries; trained weights, say, must "
            "not be taken for momentums. Use SafeDSHBClient on the nodes, or say "
            "foreign_clients=True if your own clients send momentums, too"
        )
    f = _remaining(sent.num_malicious, screened)
    findings: Metrics = {}
    arrays = None
    if len(screened.accepted) <= 2 * f:
        log(
            WARNING,
            "Round skipped: %d replies are left and up to %d of them are adversarial",
            len(screened.accepted),
            f,
        )
    else:
        nodes, momentums = zip(*screened.accepted, strict=True)
        try:
            direction, weighing = rule.aggregate([m.layers for m in momentums], f)
        except (ValueError, ArithmeticError) as error:
            # A rule may need more than n > 2f, or not survive what adversaries made up.
            log(WARNING, "Round skipped: the rule failed: %s", error)
        else:
            findings = _findings(rule, f, nodes, weighing)
            if weighing is not None and sent.noise_std is not None:
                layers = [m.layers for m in momentums]
                findings |= _estimates(layers, direction, weighing, sent.noise_std)
            rate = sent.local_steps * sent.learning_rate
            arrays = _stepped(sent.arrays, direction, rate)
    return Outcome(
        arrays,
        {
            "replies": len(screened.accepted),
            "excluded": screened.excluded.total(),
            "ignored": screened.ignored,
            "num-malicious-nodes": f,
            "skipped": int(arrays is None),
            **{f"excluded-{r}": n for r, n in sorted(screened.excluded.items())},
            **findings,
            **statements({node: reply.stated for node, reply in screened.accepted}),
            "learning-rate": sent.learning_rate,
            "momentum": sent.momentum,
        },
    )


def refuse_total_failure(metrics: Metrics, num_malicious: int) -> None:
    """End a run in whose first round no node could do its part.

    Raises
    ------
    RuntimeError
        If replies came, more than adversaries could have sent, and none could be used.
    """
    reasons = {
        name.removeprefix("excluded-"): count
        for name, count in metrics.items()
        if name.startswith("excluded-") and name != "excluded-missing"
    }
    failed = sum(count for count in reasons.values() if isinstance(count, int))
    if not metrics["replies"] and failed > num_malicious:
        told = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        raise RuntimeError(
            f"no node could take the first step ({told}), so nothing was trained; what "
            "they said is in the log above, and the rest in the logs of the nodes"
        )


def _remaining(f: int, screened: Screened) -> int:
    """Return f', which is f less those who proved to be adversaries."""
    if screened.proven > f:
        log(
            WARNING,
            "%d replies prove an adversary and num_malicious_nodes is %d: the "
            "assumption that everything rests on is broken, or honest clients hold "
            "another model",
            screened.proven,
            f,
        )
    return max(f - screened.proven, 0)


def _stepped(
    arrays: ArrayRecord, direction: list[Floats], rate: float
) -> ArrayRecord | None:
    """Return theta - rate * R, in the dtypes of theta; None if not finite."""
    result = []
    for old, layer in zip(read(arrays), direction, strict=True):
        new = stepped(old, layer, rate)
        if not np.isfinite(new).all():
            log(WARNING, "Round skipped: the step would leave the range of numbers")
            return None
        result.append(new)
    return written(arrays, result)


def _findings(
    rule: Rule, f: int, nodes: Sequence[int], weighing: Weighing | None
) -> Metrics:
    findings: Metrics = {}
    kappa = None if weighing is None else weighing.kappa
    if kappa is None:
        kappa = rule.kappa(len(nodes), f)
    if weighing is not None:
        findings["lambda-max"] = float(weighing.lambda_max)
        left_out = np.flatnonzero(weighing.weights == 0.0)
        findings["left-out"] = sorted(nodes[int(i)] for i in left_out)
    if kappa is not None and kappa < np.inf:
        findings["kappa"] = float(kappa)
        if rule.notion == "variance":
            findings["kappa-spectral"] = kappa_spectral(kappa, len(nodes), f)
    paper = rule.paper_kappa(len(nodes), f)
    if paper is not None:
        findings["kappa-paper"] = float(paper)
    return findings


def _estimates(
    momentums: Sequence[Sequence[Floats]],
    direction: Sequence[Floats],
    weighing: Weighing,
    noise_std: float,
) -> Metrics:
    """Estimate how far honest momentums differ, from those that count in R_t."""
    weights = weighing.weights
    squares = [sum(_square(layer) for layer in layers) for layers in momentums]
    # The trace of their covariance: the mean square less the square of the mean.
    trace = float(weights @ squares) - sum(map(_square, direction))
    vectors = max(1, round(1.0 / float(weights @ weights)))
    size = sum(layer.size for layer in direction)
    total, top = heterogeneity_estimate(
        max(trace, 0.0), weighing.lambda_max, vectors, size, noise_std
    )
    return {"heterogeneity-estimate": total, "heterogeneity-spectral-estimate": top}


def _square(layer: Floats) -> float:
    flat = np.ravel(layer).astype(np.float64)
    return float(flat @ flat)
