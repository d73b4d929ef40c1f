"""A run of a strategy, from its first round or from where it was left.

`ResumableStrategy` is all of `SafeDSHB` that is not its algorithm: it resumes from a
checkpoint, sends messages that do not outlive their round, and lets nodes evaluate the
model without trusting any of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
)
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from flwr_safedshb.exchange.arrays import Template
from flwr_safedshb.server.checkpoint import EvaluateFn, Progress, past_of, save
from flwr_safedshb.server.collection import CarefulGrid
from flwr_safedshb.server.evaluation import evaluation_content, medians
from flwr_safedshb.server.participation import (
    Participation,
    wait_for_nodes,
    warn_of_strangers,
)
from flwr_safedshb.server.schedules import Schedule, rates_at
from flwr_safedshb.server.settings import settings_of

# By how much a message outlives its round, so that silence is seen as silence.
_LEEWAY_SECONDS = 10.0


class ResumableStrategy(FedAvg):
    """A strategy whose runs can be resumed; its subclass says what a round does."""

    participation: Participation
    num_malicious_nodes: int
    authenticated_nodes: bool
    server_learning_rate: Schedule
    momentum: Schedule
    output: str
    seed: int
    checkpoint: Path | None

    # Of the running run.
    _seeded: bool
    _rates: list[tuple[float, float]]
    _progress: Progress | None = None
    _template: Template | None = None
    _offset = 0
    _ttl: float | None = None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run T = `num_rounds` steps of Algorithm 1, or those still to do.

        Arguments and result are those of every Flower strategy. The round numbers of a
        resumed run go on where they were.
        """
        if num_rounds < 0:
            raise ValueError(f"num_rounds={num_rounds} must be at least 0")
        self._rates = [
            rates_at(self.server_learning_rate, self.momentum, step)
            for step in range(num_rounds)
        ]
        if self.num_malicious_nodes > 0:
            warn_of_strangers(grid, self.num_malicious_nodes, self.authenticated_nodes)
        configs = {"train_config": train_config, "evaluate_config": evaluate_config}
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
        # A busy node must not spend budget on a round that is long over.
        self._ttl = timeout + _LEEWAY_SECONDS

        super().start(
            CarefulGrid(grid),
            progress.arrays,
            num_rounds - self._offset,
            timeout,
            train_config,
            evaluate_config,
            evaluate_fn and progress.evaluating(evaluate_fn, self._offset),
        )
        if self.checkpoint is not None:
            save(self.checkpoint, progress)
        kept = progress.kept if self.output == "uniform" else None
        return Result(
            progress.arrays if kept is None else kept,
            progress.train,
            progress.evaluate_clientapp,
            progress.evaluate_serverapp,
        )

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send the model to nodes that evaluate it, if the user asked for that."""
        if self.fraction_evaluate == 0.0:
            return []
        timeout = self.participation.node_timeout
        nodes = wait_for_nodes(grid, self.min_evaluate_nodes, timeout)
        size = int(len(nodes) * self.fraction_evaluate)
        asked = ConfigRecord({**config, "server-round": server_round + self._offset})
        content = evaluation_content(
            arrays, asked, self.arrayrecord_key, self.configrecord_key
        )
        chosen = nodes[: max(size, self.min_evaluate_nodes)]
        return [
            Message(content, node, MessageType.EVALUATE, ttl=self._ttl)
            for node in chosen
        ]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the median of each metric over the nodes: no node is trusted."""
        found = medians(replies)
        if not found:
            return None
        metrics = MetricRecord({**found})
        if self._progress is not None:
            number = server_round + self._offset
            self._progress.evaluate_clientapp[number] = metrics
        return metrics

    def _begin(self, progress: Progress) -> Template:
        self._progress = progress
        self._offset = progress.step
        self._template = template = Template.of(progress.arrays)
        self.seed = progress.seed
        return template
