"""A run of a strategy, from its first round or from where it was left.

`ResumableStrategy` is all of `SafeDSHB` that is not its algorithm: it resumes from a
checkpoint, sends messages that do not outlive their round, and lets nodes evaluate the
model without trusting any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from logging import INFO, WARNING
from pathlib import Path

import numpy as np
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
)
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from flwr_safedshb.algorithm.attendance import Attendance
from flwr_safedshb.algorithm.checkpoint import past_of, save
from flwr_safedshb.algorithm.output import Output, returned
from flwr_safedshb.algorithm.participation import Participation, warn_of_strangers
from flwr_safedshb.algorithm.plain_evaluation import (
    chosen,
    evaluation_content,
    medians,
)
from flwr_safedshb.algorithm.privacy_report import log_privacy
from flwr_safedshb.algorithm.private_evaluation import PrivateEvaluations, concluded
from flwr_safedshb.algorithm.progress import EvaluateFn, History, Progress
from flwr_safedshb.algorithm.schedules import Schedule, rates_at
from flwr_safedshb.algorithm.settings import (
    check_initial,
    settings_of,
    warn_of_plain_evaluation,
)
from flwr_safedshb.algorithm.wire import Template
from flwr_safedshb.flower.grid import FaultTolerantGrid, SimulatedGrid

# Which random choice a generator is for.
NODES, OUTPUT, EVALUATORS = 0, 1, 2
# By how much a message outlives its round, so that silence is seen as silence.
_LEEWAY_SECONDS = 10.0


# Of a round and its metrics: whether the run has done its work.
StopWhen = Callable[[int, Mapping[str, object]], bool]


class NothingTrainedError(RuntimeError):
    """A run has ended, and none of its rounds took a step.

    Attributes
    ----------
    metrics : dict of int to MetricRecord
        Those of the rounds.
    """

    def __init__(self, metrics: History) -> None:
        super().__init__(
            f"nothing was trained: all rounds, {len(metrics)} in number, were skipped; "
            "the log says why, and failing-nodes in the metrics names the nodes that "
            "failed: repair them, or add others, and start a new run"
        )
        self.metrics = metrics


@dataclass(repr=False)
class RunResult(Result):
    """What `SafeDSHB.start` returns: Flower's `Result`, and what was not trained.

    Attributes
    ----------
    skipped_rounds : list of int
        The rounds that took no step.
    """

    skipped_rounds: list[int] = field(default_factory=list)

    def __repr__(self) -> str:
        """Return Flower's text, with the skipped rounds in the end."""
        skipped, rounds = len(self.skipped_rounds), len(self.train_metrics_clientapp)
        return f"{super().__repr__()}\n{skipped} of {rounds} rounds skipped\n"


class StopRun(Exception):  # noqa: N818  # it is none
    """The run has done its work."""


class ResumableStrategy(FedAvg):
    """A strategy whose runs can be resumed; its subclass says what a round does."""

    participation: Participation
    num_malicious_nodes: int
    authenticated_nodes: bool
    server_learning_rate: Schedule
    momentum: Schedule
    output: Output
    local_steps: int
    evaluations: PrivateEvaluations | None
    seed: int
    checkpoint: Path | None
    stop_when: StopWhen | None

    # Of the running run.
    # T, all rounds of the run with those done before; None where nobody said, as when
    # a server of the older kind asks for one round after another.
    num_rounds: int | None = None
    _seeded: bool
    _rates: list[tuple[float, float]]
    _progress: Progress | None = None
    _template: Template | None = None
    _offset = 0
    _ttl: float | None = None
    _evaluating: list[Message] | None = None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> RunResult:
        """Run T = `num_rounds` rounds of Algorithm 1, or those still to do.

        Arguments and result are those of every Flower strategy; the result says, too,
        which rounds were skipped. The round numbers of a resumed run go on where they
        were.

        Raises
        ------
        NothingTrainedError
            If all rounds of the run were skipped.
        """
        if self.num_malicious_nodes > 0:
            warn_of_strangers(grid, self.num_malicious_nodes, self.authenticated_nodes)
        configs = {"train_config": train_config, "evaluate_config": evaluate_config}
        progress = self.begin(initial_arrays, num_rounds, timeout, **configs)
        with suppress(StopRun):
            super().start(
                # What answers in this process answers each message alone.
                grid if isinstance(grid, SimulatedGrid) else FaultTolerantGrid(grid),
                progress.arrays,
                num_rounds - self._offset,
                timeout,
                train_config,
                evaluate_config,
                evaluate_fn and progress.evaluating(evaluate_fn, self._offset),
            )
        return RunResult(
            self.finish(progress),
            progress.train,
            progress.evaluate_clientapp,
            progress.evaluate_serverapp,
            progress.skipped_rounds,
        )

    def initialize_parameters(self, client_manager: object) -> None:
        """Say what a server of the older kind needs, which asks this first."""
        raise TypeError(
            "ServerAppComponents needs a strategy of the older kind; say "
            f"strategy=ClassicStrategy({type(self).__name__}(...), initial)"
        )

    def begin(
        self,
        initial_arrays: ArrayRecord,
        num_rounds: int,
        timeout: float,
        **configs: ConfigRecord | None,
    ) -> Progress:
        """Begin a run, or take up the one of the checkpoint."""
        if not isinstance(num_rounds, int) or num_rounds < 0:
            raise ValueError(f"num_rounds={num_rounds!r} must be an integer from 0 on")
        check_initial(initial_arrays)
        warn_of_plain_evaluation(self.fraction_evaluate)
        self._rates = [self._rates_in(number) for number in range(num_rounds)]
        settings = settings_of(self, initial_arrays, self._rates, **configs)
        progress = None
        if self.checkpoint is not None:
            # Without a seed of its own a run takes that of the checkpoint.
            any_seed = {} if self._seeded else {"seed": None}
            size = sum(len(array.data) for array in initial_arrays.values())
            progress = past_of(self.checkpoint, {**settings, **any_seed}, size)
        if progress is None:
            progress = Progress.fresh(self.seed, num_rounds, initial_arrays, settings)
        self._begin(progress)
        self.num_rounds = num_rounds
        # A busy node must not spend budget on a round that is long over.
        self._ttl = timeout + _LEEWAY_SECONDS
        return progress

    def finish(self, progress: Progress) -> ArrayRecord:
        """Save a run that has ended, say what it cost, and return its model.

        Raises
        ------
        NothingTrainedError
            If all of its rounds were skipped.
        """
        if self.checkpoint is not None:
            save(self.checkpoint, progress)
        log_privacy(progress.train.get(progress.step, {}), self.fraction_evaluate > 0.0)
        rounds, skipped = len(progress.train), len(progress.skipped_rounds)
        if skipped:
            told = "%d of %d rounds were skipped, and took no step"
            log(WARNING, told, skipped, rounds)
            if skipped == rounds:
                raise NothingTrainedError(progress.train)
        return returned(progress, self.output)

    @property
    def rounds_done(self) -> int:
        """Rounds of the run that were done before it was taken up."""
        return self._offset

    def _stop_if_wanted(self, progress: Progress) -> None:
        """End the run if the last round was the one that was waited for."""
        number = progress.step
        if self.stop_when is None or number not in progress.train:
            return
        metrics = {
            **progress.train[number],
            **progress.evaluate_clientapp.get(number, {}),
            **progress.evaluate_serverapp.get(number, {}),
        }
        if self.stop_when(number, metrics):
            log(INFO, "Stopped after round %d, as stop_when says", number)
            raise StopRun

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send the model to nodes that evaluate it, if the user asked for that."""
        number = server_round + self._offset
        nodes: list[int] = []
        if self.evaluations is not None and self._progress is not None:
            # Each answer costs budget, so that all of them are worth having.
            if self.evaluations.is_due(number, self._progress.num_rounds):
                nodes = self._evaluators(grid, number)
            asked = self.evaluations.config(number, self._progress.session)
            if number == self._progress.num_rounds:
                arrays = returned(self._progress, self.output)
        elif self.fraction_evaluate > 0.0:
            nodes = chosen(
                sorted(grid.get_node_ids()),
                self.fraction_evaluate,
                self.min_evaluate_nodes,
                np.random.default_rng([self.seed, EVALUATORS, number]),
            )
            asked = ConfigRecord({**config, "server-round": number})
        self._evaluating = []
        if not nodes:
            return []
        content = evaluation_content(
            arrays, asked, self.arrayrecord_key, self.configrecord_key
        )
        self._evaluating = [
            Message(
                content, node, MessageType.EVALUATE, ttl=self._ttl, group_id=str(number)
            )
            for node in nodes
        ]
        return self._evaluating

    def _evaluators(self, grid: Grid, number: int) -> list[int]:
        """Return all nodes, or none where too few can be counted on for an answer."""
        nodes = sorted(grid.get_node_ids())
        found = self._progress.train.get(number) if self._progress else None
        usable, _ = Attendance.from_metrics(found or MetricRecord()).split(nodes)
        if len(usable) > 2 * self.num_malicious_nodes:
            return nodes
        log(WARNING, "Evaluation left out: only %d nodes answered before", len(usable))
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the median of each metric over the nodes: no node is trusted."""
        f, sent = self.num_malicious_nodes, self._evaluating or []
        found: Mapping[str, int | float | list[int] | list[float]] | None
        if self.evaluations is None:
            found = medians(replies, f, self._evaluating)
        else:
            found = concluded(self.evaluations, sent, f, replies) if sent else None
        if not found:
            return None
        metrics = MetricRecord({**found})
        if self._progress is not None:
            number = server_round + self._offset
            self._progress.evaluate_clientapp[number] = metrics
        return metrics

    def _rng(self, purpose: int, step: int = 0) -> np.random.Generator:
        # By step and not by state, so that a resumed run chooses the same.
        return np.random.default_rng([self.seed, purpose, step])

    def _output_index(self, progress: Progress) -> int:
        return int(self._rng(OUTPUT).integers(progress.num_rounds))

    def _rates_in(self, number: int) -> tuple[float, float]:
        """Return gamma and beta of a round, counted from 0: those of its first step."""
        step = number * self.local_steps
        return rates_at(self.server_learning_rate, self.momentum, step)

    def _begin(self, progress: Progress) -> Template:
        self._progress = progress
        self._offset = progress.step
        self._template = template = Template.of(progress.arrays)
        self.seed = progress.seed
        return template
