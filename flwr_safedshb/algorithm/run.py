"""A run of Safe-DSHB on the server: its rounds, its evaluations and its checkpoint.

`TrainingRun` holds the state of a run that a strategy drives. It chooses the nodes of
each round and remembers what was sent to them; `aggregate_round` computes the rest.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from logging import INFO, WARNING
from pathlib import Path
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

from flwr_safedshb.algorithm import wire
from flwr_safedshb.algorithm.attendance import Attendance
from flwr_safedshb.algorithm.checkpoint import load_matching, save
from flwr_safedshb.algorithm.closing import log_closing
from flwr_safedshb.algorithm.expectation import expect_run, log_once
from flwr_safedshb.algorithm.output import add_to_mean, draw_index, select_output
from flwr_safedshb.algorithm.participation import Cohort, split_risk
from flwr_safedshb.algorithm.plain_evaluation import (
    compute_medians,
    draw_evaluators,
    make_evaluation_content,
)
from flwr_safedshb.algorithm.privacy_card import PrivacyCard, make_card
from flwr_safedshb.algorithm.private_evaluation import aggregate_evaluation
from flwr_safedshb.algorithm.progress import NothingTrainedError, Progress, StopRun
from flwr_safedshb.algorithm.receipt_book import ReceiptBook
from flwr_safedshb.algorithm.round import NORM_BOUND, SentRound, aggregate_round
from flwr_safedshb.algorithm.round_record import name_folder
from flwr_safedshb.algorithm.run_identity import identify_run
from flwr_safedshb.algorithm.run_status import StatusWriter
from flwr_safedshb.algorithm.schedules import noise_left
from flwr_safedshb.algorithm.screening import check_first_round, l2_norm
from flwr_safedshb.algorithm.settings import (
    StrategySettings,
    check_initial_arrays,
    check_whole,
    warn_of_no_adversaries,
    warn_of_plain_evaluation,
    warn_of_unused_config,
)
from flwr_safedshb.algorithm.wire import Template, decode_arrays
from flwr_safedshb.flower.compat import replace_entries_unchecked

# The purposes of random generators: each has its own stream. Stream 1 is `output`'s.
NODES, EVALUATORS = 0, 2
# By how much a message outlives its round, so that silence is seen as silence.
_LEEWAY_SECONDS = 10.0


@dataclass(frozen=True)
class RecordKeys:
    """The keys of the two records in a message."""

    arrays: str
    config: str


class TrainingRun:
    """The state of a run, from its first round or from its checkpoint.

    Parameters
    ----------
    settings : StrategySettings
    keys : RecordKeys
    strategy : str
        The name of the strategy's class, which is part of the run's identity.

    Attributes
    ----------
    progress : Progress or None
        None before the run has begun.
    num_rounds : int or None
        T, the rounds of the whole run, those before a restart included. None if it is
        unknown, as with Flower's legacy API, which asks for one round after another.
    rounds_done : int
        Rounds that were done before the run was resumed.
    card : PrivacyCard or None
        What is known about the privacy of the run, once it has ended.
    """

    def __init__(
        self, settings: StrategySettings, keys: RecordKeys, strategy: str
    ) -> None:
        self.settings = settings
        self.progress: Progress | None = None
        self.num_rounds: int | None = None
        self.rounds_done = 0
        self.card: PrivacyCard | None = None
        self._keys, self._strategy = keys, strategy
        self._sent: SentRound | None = None
        self._sent_evaluation: list[Message] | None = None
        self._rates: list[tuple[float, float]] = []
        self._template: Template | None = None
        self._ttl: float | None = None
        checkpoint = settings.checkpoint
        self._status = None if checkpoint is None else StatusWriter(Path(checkpoint))
        self._book: ReceiptBook | None = None

    def begin(
        self,
        initial_arrays: ArrayRecord,
        num_rounds: int,
        timeout: float,
        **configs: ConfigRecord | None,
    ) -> Progress:
        """Begin a run of T = `num_rounds` rounds, or resume it from the checkpoint."""
        num_rounds = check_whole("num_rounds", num_rounds)
        check_initial_arrays(initial_arrays)
        settings = self.settings
        warn_of_plain_evaluation(settings.fraction_evaluate)
        rates = [settings.rates_in_round(number) for number in range(num_rounds)]
        identity = identify_run(
            settings, self._strategy, initial_arrays, rates, **configs
        )
        progress = None
        if settings.checkpoint is not None:
            size = sum(len(array.data) for array in initial_arrays.values())
            progress = load_matching(Path(settings.checkpoint), identity, size)
        if progress is None:
            progress = self._make_progress(num_rounds, initial_arrays, identity)
        self._set_progress(progress)
        if settings.receipts is not None:
            folder = name_folder(Path(cast(str, settings.checkpoint)))
            self._book = ReceiptBook(folder, settings.receipts, self.rounds_done)
        self.num_rounds, self._rates = num_rounds, rates
        # A busy node must not spend budget on a round that is long over.
        self._ttl = timeout + _LEEWAY_SECONDS
        return progress

    def plan_round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return messages with theta_t, the step and beta for nodes (Alg. 1, line 2).

        Raises
        ------
        StopRun
            If `stop_when` returns True for the last round.
        """
        settings = self.settings
        progress, template = self.progress, self._template
        if progress is None or template is None:  # nobody called `begin`
            progress = self._make_progress(server_round, arrays, {})
            template = self._set_progress(progress)
        step = progress.step = server_round + self.rounds_done - 1
        first = step == self.rounds_done
        if first:
            warn_of_no_adversaries(settings.num_malicious_nodes)
        progress.arrays = arrays
        self._stop_if_wanted(progress)
        if settings.output == "uniform" and step == draw_index(
            progress.seed, progress.num_rounds
        ):
            progress.kept = arrays
        due = step % settings.checkpoint_every == 0
        if due and not first and settings.checkpoint is not None:
            save(Path(settings.checkpoint), progress)
        before = {**progress.train.get(step, MetricRecord())}
        cohort = settings.participation.choose_nodes(
            grid,
            lambda: self._make_rng(NODES, step),
            before,
            step + 1,
            self.num_rounds,
            first=first,
        )
        if first:
            warn_of_unused_config(config)
            self._log_expectation(progress, cohort)
        while len(self._rates) <= step:  # the number of rounds is open
            self._rates.append(settings.rates_in_round(len(self._rates)))
        rate, momentum = self._rates[step]
        # In every round, if the last one is not known.
        report = settings.stop_when is not None or step + 1 >= progress.num_rounds
        # The types of these are known, so Flower's checks are skipped.
        entries = {
            **config,
            "server-round": step + 1,
            "step": step * settings.local_steps,
            "momentum": momentum,
            "session": progress.session,
            wire.LOCAL_STEPS: settings.local_steps,
            wire.LEARNING_RATE: rate,
            # Whether the run may be resumed from the step before this one.
            wire.CHECKPOINTED: due,
            wire.REPORT_PRIVACY: report,
            **({} if self._book is None else {wire.SIGN_RECEIPT: True}),
            **self._run_length(progress),
            # Objects are named by the hash of their bytes; the nonce makes it
            # unpredictable.
            "nonce": secrets.token_hex(8),
        }
        content = RecordDict({self._keys.arrays: arrays})
        content[self._keys.config] = replace_entries_unchecked(ConfigRecord(), entries)
        messages = self._make_messages(
            content, cohort.nodes, MessageType.TRAIN, step + 1
        )
        if self._status is not None:
            self._status.begin_round(progress, cohort.nodes)
        page = None
        if self._book is not None:
            local_steps = settings.local_steps
            page = self._book.open_page(step + 1, progress.session, local_steps, arrays)
        self._sent = SentRound(
            arrays,
            template,
            messages,
            cohort.num_malicious,
            rate,
            momentum,
            self._noise_in_momentum(step),
            settings.foreign_clients,
            settings.local_steps,
            report,
            self._bound_norm(progress, len(messages), rate, before),
            step + 1,
            before,
            page,
        )
        return messages

    def finish_round(
        self, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord]:
        """Aggregate the replies of the planned round, and record the step."""
        progress, sent = self.progress, self._sent
        if progress is None or sent is None:
            raise RuntimeError("aggregate_train needs configure_train before it")
        arrays, found = aggregate_round(sent, self.settings.aggregation, replies)
        if progress.step == self.rounds_done:
            check_first_round(found, sent.num_malicious)
        metrics = replace_entries_unchecked(MetricRecord(), found)
        progress.step += 1
        if arrays is not None:
            progress.arrays = arrays
        if self.settings.output == "average":
            add_to_mean(progress)
        progress.train[progress.step] = metrics
        if self._status is not None:
            self._status.end_round(progress)
        return arrays, metrics

    def plan_evaluation(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return messages with the model for the nodes that evaluate it, if any."""
        number, settings = server_round + self.rounds_done, self.settings
        nodes: list[int] = []
        progress, evaluations = self.progress, settings.evaluations
        if evaluations is not None and progress is not None:
            if evaluations.is_due(number, progress.num_rounds):
                nodes = self._find_evaluators(grid, number)
            config = evaluations.make_config(number, progress.session)
            if number == progress.num_rounds:
                arrays = select_output(progress, settings.output)
        elif settings.fraction_evaluate > 0.0:
            nodes = draw_evaluators(
                sorted(grid.get_node_ids()),
                settings.fraction_evaluate,
                cast(int, settings.min_evaluate_nodes),
                self._make_rng(EVALUATORS, number),
            )
            config = ConfigRecord({**config, "server-round": number})
        self._sent_evaluation = []
        if nodes:
            content = make_evaluation_content(
                arrays, config, self._keys.arrays, self._keys.config
            )
            self._sent_evaluation = self._make_messages(
                content, nodes, MessageType.EVALUATE, number
            )
        return self._sent_evaluation

    def finish_evaluation(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Aggregate the nodes' replies robustly, and record the metrics."""
        f, evaluations = self.settings.num_malicious_nodes, self.settings.evaluations
        sent = self._sent_evaluation
        found: Mapping[str, int | float | list[int] | list[float]] | None
        if evaluations is None:
            found = compute_medians(replies, f, sent)
        else:
            found = (
                aggregate_evaluation(evaluations, sent, f, replies) if sent else None
            )
        if not found:
            return None
        metrics = MetricRecord({**found})
        if self.progress is not None:
            number = server_round + self.rounds_done
            self.progress.evaluate_clientapp[number] = metrics
        return metrics

    @contextmanager
    def name_interruption(self) -> Iterator[None]:
        """Say what Ctrl-C leaves, and leave the frames of what was running out."""
        try:
            yield
        except KeyboardInterrupt:
            rounds = "an open number of" if self.num_rounds is None else self.num_rounds
            done = 0 if self.progress is None else self.progress.step
            kept = "nothing was kept: give the strategy a checkpoint= to resume from"
            if self.settings.checkpoint is not None:
                kept = f"start the same run again to resume {self.settings.checkpoint}"
            log(WARNING, "Interrupted after %d of %s rounds; %s", done, rounds, kept)
            raise KeyboardInterrupt from None

    def finish(self) -> ArrayRecord:
        """Save the run and its privacy card, and return its model.

        Raises
        ------
        NothingTrainedError
            If all of its rounds were skipped.
        """
        progress, settings = self.progress, self.settings
        if progress is None:
            raise RuntimeError("finish needs begin before it")
        if settings.checkpoint is not None:
            save(Path(settings.checkpoint), progress)
        log_closing(progress)
        rounds, skipped = len(progress.train), len(progress.skipped_rounds)
        if self._status is not None:
            self._status.end_run(progress)
        if skipped:
            text = "%d of %d rounds were skipped and took no step"
            log(WARNING, text, skipped, rounds)
            if skipped == rounds:
                raise NothingTrainedError(progress.train)
        model = select_output(progress, settings.output)
        self.card = make_card(progress, settings.aggregation, model)
        if settings.checkpoint is not None:
            self.card.write(Path(settings.checkpoint).with_suffix(".privacy"))
        return model

    def _make_progress(
        self, num_rounds: int, arrays: ArrayRecord, identity: dict[str, object]
    ) -> Progress:
        seed = self.settings.seed
        seed = secrets.randbits(63) if seed is None else seed
        return Progress.fresh(seed, num_rounds, arrays, {**identity, "seed": seed})

    def _set_progress(self, progress: Progress) -> Template:
        """Continue from this progress; return the template of its arrays."""
        self.progress, self.rounds_done = progress, progress.step
        self._template = template = Template.of(progress.arrays)
        return template

    def _make_messages(
        self, content: RecordDict, nodes: Iterable[int], kind: str, number: int
    ) -> list[Message]:
        group = str(number)  # shown in the nodes' logs
        return [
            Message(content, node, kind, ttl=self._ttl, group_id=group)
            for node in nodes
        ]

    def _stop_if_wanted(self, progress: Progress) -> None:
        """Raise StopRun if `stop_when` returns True for the last round."""
        number, stop_when = progress.step, self.settings.stop_when
        if stop_when is None or number not in progress.train:
            return
        metrics = {
            **progress.train[number],
            **progress.evaluate_clientapp.get(number, {}),
            **progress.evaluate_serverapp.get(number, {}),
        }
        if stop_when(number, metrics):
            log(INFO, "Stopped after round %d, because stop_when returned True", number)
            raise StopRun

    def _run_length(self, progress: Progress) -> dict[str, int]:
        """Return the most steps and evaluations of each node as config entries.

        Empty if they are unknown (a run without `begin`), or if nodes take part in some
        rounds only, which would commit them to far more steps than they take.
        """
        rounds, evaluations = progress.num_rounds, self.settings.evaluations
        if self.num_rounds is None or self.settings.participation.fraction < 1.0:
            return {}
        count = 0
        if evaluations is not None:
            count = rounds // evaluations.every + (rounds % evaluations.every > 0)
        steps = rounds * self.settings.local_steps
        return {wire.RUN_STEPS: steps, wire.RUN_EVALUATIONS: count}

    def _find_evaluators(self, grid: Grid, number: int) -> list[int]:
        """Return all nodes, or none if too few answered in the last round.

        Each answer costs privacy budget, and too few would be discarded.
        """
        nodes = sorted(grid.get_node_ids())
        found = self.progress.train.get(number) if self.progress else None
        usable, _ = Attendance.from_metrics(found or MetricRecord()).split(nodes)
        if len(usable) > 2 * self.settings.num_malicious_nodes:
            return nodes
        log(WARNING, "Evaluation skipped: only %d nodes answered before", len(usable))
        return []

    def _bound_norm(
        self,
        progress: Progress,
        num_nodes: int,
        learning_rate: float,
        metrics: Mapping[str, object],
    ) -> float:
        """Return the bound on the norm of an honest reply; infinite if none is known.

        The bound of each round follows from that of the round before, in its metrics,
        because a momentum contains all gradients so far.
        """
        before = cast(float, metrics.get(NORM_BOUND, 0.0))
        bound, local_steps = self.settings.norm_bound, self.settings.local_steps
        if bound is None or not num_nodes:
            return before or np.inf
        risk = 1 - Fraction(bound.confidence)
        risk = split_risk(risk, progress.step + 1, self.num_rounds)
        weights = [array.numpy() for array in progress.arrays.values()]
        gradient_norm = bound.gradient_norm(
            sum(layer.size for layer in weights), risk / (num_nodes * local_steps)
        )
        return bound.reply_norm(
            gradient_norm, before, l2_norm(weights), learning_rate, local_steps
        )

    def _log_expectation(self, progress: Progress, cohort: Cohort) -> None:
        """Log whether the training has a chance, where clip and noise are public."""
        settings, bound = self.settings, self.settings.norm_bound
        noise_std = settings.noise_std if bound is None else bound.noise_std
        if self.num_rounds is None or noise_std is None:
            return
        for expectation in expect_run(
            decode_arrays(progress.arrays),
            noise_std,
            None if bound is None else bound.clip_norm,
            (len(cohort.nodes), cohort.num_malicious),
            self.num_rounds * settings.local_steps,
            self._rates[0],
        ):
            log_once(expectation)

    def _noise_in_momentum(self, step: int) -> float | None:
        """Return the noise in the momentum of a node that took every step so far."""
        noise_std = self.settings.noise_std
        if noise_std is None:
            return None
        betas = [beta for _, beta in self._rates[: step + 1]]
        return noise_std * noise_left(betas, self.settings.local_steps)

    def _make_rng(self, purpose: int, step: int = 0) -> np.random.Generator:
        # A function of the step, so that a resumed run makes the same choices.
        seed = self.settings.seed if self.progress is None else self.progress.seed
        return np.random.default_rng([seed or 0, purpose, step])
