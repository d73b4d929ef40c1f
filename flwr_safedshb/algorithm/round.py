"""A round as the server takes it: what it sends, and what it makes of the replies.

`Rounds` and `conclude` read like the server's half of Algorithm 1: ask the nodes of the
round, screen what came, find how many adversaries may be left, aggregate, take a step.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from logging import WARNING
from typing import cast

import numpy as np
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.common import log
from flwr.serverapp import Grid

from flwr_safedshb.aggregation.rule import Rule, Weighing
from flwr_safedshb.algorithm.attendance import FAILING_NODES, Attendance
from flwr_safedshb.algorithm.checkpoint import save
from flwr_safedshb.algorithm.heterogeneity import estimates
from flwr_safedshb.algorithm.norm_bound import NormBound
from flwr_safedshb.algorithm.output import add_to_mean
from flwr_safedshb.algorithm.participation import risk_in_round
from flwr_safedshb.algorithm.privacy_report import statements
from flwr_safedshb.algorithm.progress import Progress
from flwr_safedshb.algorithm.resumable import NODES, ResumableStrategy
from flwr_safedshb.algorithm.schedules import noise_left
from flwr_safedshb.algorithm.screening import (
    ForeignClientsError,
    Screened,
    norm,
    refuse_total_failure,
    screen_all,
)
from flwr_safedshb.algorithm.settings import run_length, warn_of_idle_settings
from flwr_safedshb.algorithm.wire import (
    LEARNING_RATE,
    LOCAL_STEPS,
    REPORT_PRIVACY,
    Template,
    apply_update,
)
from flwr_safedshb.flower.compat import replace_entries_unchecked
from flwr_safedshb.theory import kappa_spectral

Metrics = dict[str, int | float | list[int] | list[float]]
# The bound on the norm of an honest reply, and the rounds so far without a step.
NORM_BOUND, SKIPPED_ROUNDS = "norm-bound", "skipped-rounds"


@dataclass(frozen=True)
class Round:
    """What was sent in a round.

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
        Whether replies need no mark of our clients.
    local_steps : int
        K, how many steps a momentum is the mean of.
    states : bool
        Whether nodes were asked what the run costs them.
    norm_bound : float
        No honest reply is longer; infinite where nothing is known.
    number : int
        The number of the round, from 1 on.
    before : mapping
        The metrics of the round before: which nodes failed, and how many rounds were
        skipped.
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
    states: bool = False
    norm_bound: float = math.inf
    number: int = 1
    before: Mapping[str, object] = field(default_factory=dict)


class Rounds(ResumableStrategy):
    """The rounds of Safe-DSHB; `SafeDSHB` adds what they are made with."""

    aggregation: Rule
    noise_std: float | None
    norm_bound: NormBound | None
    foreign_clients: bool
    checkpoint_every: int
    _round: Round | None = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send theta_t, the step and beta to the nodes (Alg. 1, line 2)."""
        progress, template = self._progress, self._template
        if progress is None or template is None:
            progress = Progress.fresh(self.seed, server_round, arrays, {})
            template = self._begin(progress)
        step = progress.step = server_round + self._offset - 1
        progress.arrays = arrays
        if self.stop_when is not None:
            self._stop_if_wanted(progress)
        if self.output == "uniform" and step == self._output_index(progress):
            progress.kept = arrays
        due = step % self.checkpoint_every == 0
        if due and step > self._offset and self.checkpoint is not None:
            save(self.checkpoint, progress)
        before = {**progress.train.get(step, MetricRecord())}
        cohort = self.participation.gather(
            grid,
            lambda: self._rng(NODES, step),
            before,
            step + 1,
            self.num_rounds,
            first=step == self._offset,
        )
        if step == self._offset:
            warn_of_idle_settings(config)
        # Without `start` nobody has said how many steps there will be.
        while len(self._rates) <= step:
            self._rates.append(self._rates_in(len(self._rates)))
        rate, momentum = self._rates[step]
        # In every round, where nobody has said which is the last.
        states = self.stop_when is not None or step + 1 >= progress.num_rounds
        # These are of known types, and need not be checked.
        entries = {
            **config,
            "server-round": step + 1,
            "step": step * self.local_steps,
            "momentum": momentum,
            "session": progress.session,
            LOCAL_STEPS: self.local_steps,
            LEARNING_RATE: rate,
            # The step before this one may have to be taken up again.
            "anchor": due,
            REPORT_PRIVACY: states,
            **run_length(self, progress),
            # Objects have the hash of their bytes for a name: nobody can guess it.
            "nonce": secrets.token_hex(8),
        }
        asked = replace_entries_unchecked(ConfigRecord(), entries)
        content = RecordDict({self.arrayrecord_key: arrays})
        content[self.configrecord_key] = asked
        group = str(step + 1)  # which the logs of nodes show
        messages = [
            Message(content, node, MessageType.TRAIN, ttl=self._ttl, group_id=group)
            for node in cohort.nodes
        ]
        self._round = Round(
            arrays,
            template,
            messages,
            cohort.num_malicious,
            rate,
            momentum,
            self._noise_in_momentum(step),
            self.foreign_clients,
            self.local_steps,
            states,
            self._reply_norm(progress, len(messages), rate, before),
            step + 1,
            before,
        )
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Screen and aggregate momentums, and take a step (Alg. 1, lines 9 and 10)."""
        progress = self._progress
        if progress is None or self._round is None:
            raise RuntimeError("aggregate_train needs configure_train before it")
        arrays, found = conclude(self._round, self.aggregation, replies)
        if progress.step == self._offset:
            refuse_total_failure(found, self._round.num_malicious)
        metrics = replace_entries_unchecked(MetricRecord(), found)
        progress.step += 1
        if arrays is not None:
            progress.arrays = arrays
        if self.output == "average":
            add_to_mean(progress)
        progress.train[progress.step] = metrics
        return arrays, metrics

    def _reply_norm(
        self,
        progress: Progress,
        num_nodes: int,
        learning_rate: float,
        metrics: Mapping[str, object],
    ) -> float:
        """Return the bound on the norm of an honest reply; infinite if none is known.

        It is kept in the metrics, for momentums remember the rounds before.
        """
        before = cast(float, metrics.get(NORM_BOUND, 0.0))
        if self.norm_bound is None or not num_nodes:
            return before or math.inf
        risk = 1 - Fraction(self.norm_bound.confidence)
        risk = risk_in_round(risk, progress.step + 1, self.num_rounds)
        weights = [array.numpy() for array in progress.arrays.values()]
        return self.norm_bound.reply_norm(
            self.norm_bound.gradient_norm(
                sum(layer.size for layer in weights),
                risk / (num_nodes * self.local_steps),
            ),
            before,
            norm(weights),
            learning_rate,
            self.local_steps,
        )

    def _noise_in_momentum(self, step: int) -> float | None:
        """Return the noise in the momentum of a node that took every step so far."""
        if self.noise_std is None:
            return None
        betas = [beta for _, beta in self._rates[: step + 1]]
        return self.noise_std * noise_left(betas, self.local_steps)


def conclude(
    sent: Round, rule: Rule, replies: Iterable[Message]
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
        ``replies`` (n'), ``excluded`` and ``excluded-<reason>``, ``ignored``,
        ``num-malicious-nodes`` (f'), ``skipped``, ``skipped-rounds`` (so far),
        ``learning-rate``, ``momentum``, ``norm-bound`` where one is known,
        ``failing-nodes`` with their failures, answers in a row since and the round in
        which they are asked again; and
        where the rule tells them ``kappa``, certified for this very answer where the
        rule does that, ``kappa-spectral`` (of a rule proven in the variance sense),
        ``kappa-paper`` (the constant that the paper states), ``lambda-max`` and
        ``left-out``, the nodes that have no part in R_t. Where the noise is known also
        ``heterogeneity-estimate`` and ``heterogeneity-spectral-estimate``: how far the
        momentums that count differ, G and Gcov, with the noise taken off. Estimates,
        which adversaries can feign.

    Raises
    ------
    ForeignClientsError
        If more clients than can be adversaries send vectors that are no momentums.
    """
    ids = {m.metadata.message_id: m.metadata.dst_node_id for m in sent.messages}
    screened = screen_all(
        sent.template, ids, replies, sent.foreign_clients, sent.norm_bound
    )
    if (strange := screened.excluded["unmarked"]) > sent.num_malicious:
        raise ForeignClientsError(strange, sent.num_malicious)
    f = _remaining(sent.num_malicious, screened)
    findings: Metrics = {}
    arrays = None
    if (left := len(screened.accepted)) <= 2 * f:
        told = "Round skipped: %d replies are left and up to %d of them are adversarial"
        log(WARNING, told, left, f)
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
                findings |= estimates(layers, direction, weighing, sent.noise_std)
            rate = sent.local_steps * sent.learning_rate
            arrays = apply_update(sent.arrays, direction, rate)
            if arrays is None:
                log(WARNING, "Round skipped: the step would leave the range of numbers")
    said = ((node, reply.records) for node, reply in screened.accepted)
    failing: dict[str, list[int]] = {}
    if screened.failed or FAILING_NODES in sent.before:
        attendance = Attendance.from_metrics(sent.before)
        asked = [*ids.values()]
        failing = attendance.after_round(sent.number, asked, screened.failed).metrics()
    skipped_rounds = cast(int, sent.before.get(SKIPPED_ROUNDS, 0))
    return (
        arrays,
        {
            "replies": left,
            "excluded": screened.excluded.total(),
            "ignored": screened.ignored,
            "num-malicious-nodes": f,
            "skipped": int(arrays is None),
            SKIPPED_ROUNDS: skipped_rounds + int(arrays is None),
            **{f"excluded-{r}": n for r, n in sorted(screened.excluded.items())},
            **findings,
            **(statements(said) if sent.states else {}),
            "learning-rate": sent.learning_rate,
            "momentum": sent.momentum,
            **({NORM_BOUND: sent.norm_bound} if sent.norm_bound < math.inf else {}),
            **failing,
        },
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
        if rule.kappa_kind == "variance":
            findings["kappa-spectral"] = kappa_spectral(kappa, len(nodes), f)
    paper = rule.paper_kappa(len(nodes), f)
    if paper is not None:
        findings["kappa-paper"] = float(paper)
    return findings
