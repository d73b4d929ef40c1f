"""Safe-DSHB, the server's half, as a Flower strategy.

Allouah, Guerraoui, Gupta, Pinot, Stephan: "On the Privacy-Robustness-Utility Trilemma
in Distributed Learning", ICML 2023, Algorithm 1. Clients send momentums of private
gradients; the server aggregates them robustly and takes a step:
theta_{t+1} = theta_t - gamma_t R_t.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Callable, Iterable, Mapping
from logging import INFO, WARNING
from pathlib import Path
from typing import Literal, get_args

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
from flwr.serverapp.strategy import FedAvg, Result

from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.aggregation.rule import Rule
from flwr_safedshb.exchange.arrays import Template
from flwr_safedshb.flower.compat import refilled
from flwr_safedshb.server.checkpoint import (
    Progress,
    Settings,
    compact,
    described,
    fingerprint,
    past_of,
    save,
)
from flwr_safedshb.server.evaluation import evaluation_content, medians
from flwr_safedshb.server.participation import (
    Cohort,
    Participation,
    wait_for_nodes,
    warn_of_strangers,
)
from flwr_safedshb.server.round import Round, conclude
from flwr_safedshb.server.schedules import Schedule, rates_at
from flwr_safedshb.server.screening import CarefulGrid
from flwr_safedshb.server.summary import log_settings

Output = Literal["last", "uniform"]
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

# By how much a message outlives its round, so that silence is seen as silence.
_LEEWAY_SECONDS = 10.0
# Which random choice a generator is for.
_NODES, _OUTPUT = 0, 1
# Arguments that say when rounds run and what is where, and not what a run computes: a
# run may be resumed with others.
_HANDLING = {
    "self",
    "min_available_nodes",
    "node_timeout",
    "authenticated_nodes",
    "checkpoint",
    "checkpoint_every",
    "arrayrecord_key",
    "configrecord_key",
}


class SafeDSHB(FedAvg):
    """Safe-DSHB: private against the server, robust against f of n clients.

    Parameters
    ----------
    aggregation : Rule
        F, how the momentums are aggregated.
    num_malicious_nodes : int
        f, how many nodes may send anything.
    server_learning_rate : float or callable of the step
        gamma_t, above 0.
    momentum : float or callable of the step
        beta_t, in [0, 1). Clients use beta_{t-1} in step t, and beta_0 in step 0.
    output : {"last", "uniform"}
        Return theta_T, or one of theta_0 .. theta_{T-1} drawn uniformly up front.
    fraction_train : float
        Share of the nodes in a round. Below 1 the adversaries among them are bounded
        with `participation_confidence`, round by round, and a share that may have no
        honest majority is refused.
    fraction_evaluate : float
        Share of the nodes that evaluate the model on their own data. What they report
        is outside the privacy guarantee, so the default is none of them.
    min_train_nodes, min_evaluate_nodes, min_available_nodes : int
        Least numbers of nodes; by default 2f + 1, the least that f can be among, and 1
        to evaluate.
    node_timeout : float
        Seconds to wait for `min_available_nodes` before giving up.
    participation_confidence : float
        See `fraction_train`.
    authenticated_nodes : bool
        Say that the SuperLink admits registered SuperNodes only, which a strategy
        cannot see: where anybody may join, f means nothing.
    seed : int, optional
        Of the server's random choices; by default from the operating system.
    checkpoint : str or Path, optional
        File to resume from if it is there, and to write to. It holds what made the run:
        with other arguments, here or of `start`, it is refused. If the first model was
        random and is gone, `load` the file and give its ``arrays`` to `start`.
    checkpoint_every : int
        Write it after so many rounds, and after the last.
    run_settings : mapping, optional
        What else makes the run, such as Flower's ``context.run_config``: the checkpoint
        holds it, too, and is refused with another.
    arrayrecord_key, configrecord_key : str
        Records of a message; for NumPyClients behind ``ClientApp(client_fn=...)`` use
        ``"fitins.parameters"`` and ``"fitins.config"``.
    """

    def __init__(
        self,
        aggregation: Rule | None = None,
        num_malicious_nodes: int = 0,
        server_learning_rate: Schedule = 1.0,
        momentum: Schedule = 0.99,
        output: Output = "last",
        *,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 0.0,
        min_train_nodes: int | None = None,
        min_evaluate_nodes: int = 1,
        min_available_nodes: int | None = None,
        node_timeout: float = 600.0,
        participation_confidence: float = 0.999,
        authenticated_nodes: bool = False,
        seed: int | None = None,
        checkpoint: str | Path | None = None,
        checkpoint_every: int = 1,
        run_settings: Mapping[str, object] | None = None,
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
    ) -> None:
        if output not in get_args(Output):
            raise ValueError(f"output={output!r} must be 'last' or 'uniform'")
        if checkpoint_every < 1:
            raise ValueError(f"checkpoint_every={checkpoint_every} must be at least 1")
        if not 0.0 <= fraction_evaluate <= 1.0:
            raise ValueError(f"fraction_evaluate={fraction_evaluate} must be in [0, 1]")
        least = 2 * num_malicious_nodes + 1
        self.participation = Participation(
            num_malicious_nodes,
            fraction_train,
            least if min_train_nodes is None else min_train_nodes,
            least if min_available_nodes is None else min_available_nodes,
            participation_confidence,
            node_timeout,
        )
        super().__init__(
            fraction_train=fraction_train,
            min_train_nodes=self.participation.min_train_nodes,
            min_evaluate_nodes=min_evaluate_nodes,
            min_available_nodes=self.participation.min_available_nodes,
            arrayrecord_key=arrayrecord_key,
            configrecord_key=configrecord_key,
        )
        # Set afterwards: to evaluate nowhere is the default here, and no warning.
        self.fraction_evaluate = fraction_evaluate
        self.aggregation = SMEA() if aggregation is None else aggregation
        self.num_malicious_nodes = num_malicious_nodes
        self.server_learning_rate = server_learning_rate
        self.momentum = momentum
        self.output = output
        self.authenticated_nodes = authenticated_nodes
        self.seed = secrets.randbits(63) if seed is None else seed
        self._seeded = seed is not None
        self.participation_confidence = participation_confidence
        self.run_settings = dict(run_settings or {})
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self.checkpoint_every = checkpoint_every
        self._rates(0)
        # Of the running run and round.
        self._progress: Progress | None = None
        self._offset = 0
        self._template: Template | None = None
        self._round: Round | None = None
        self._ttl: float | None = None

    def summary(self) -> None:
        """Log the settings of the strategy."""
        log_settings(self)

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
        settings = self._settings(
            initial_arrays,
            num_rounds,
            train_config=train_config,
            evaluate_config=evaluate_config,
        )
        if self.num_malicious_nodes > 0:
            warn_of_strangers(grid, self.num_malicious_nodes, self.authenticated_nodes)
        progress = self._resumed(initial_arrays, num_rounds, settings)
        self._begin(progress)
        # A busy node must not spend budget on a round that is long over.
        self._ttl = timeout + _LEEWAY_SECONDS

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            number = server_round + self._offset
            if evaluate_fn is None or number in progress.evaluate_serverapp:
                return progress.evaluate_serverapp.get(number)
            metrics = evaluate_fn(number, arrays)
            if metrics is not None:
                progress.evaluate_serverapp[number] = metrics
            return metrics

        super().start(
            CarefulGrid(grid),
            progress.arrays,
            num_rounds - self._offset,
            timeout,
            train_config,
            evaluate_config,
            evaluate if evaluate_fn is not None else None,
        )
        self._save(progress)
        kept = progress.kept if self.output == "uniform" else None
        return Result(
            progress.arrays if kept is None else kept,
            progress.train,
            progress.evaluate_clientapp,
            progress.evaluate_serverapp,
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send theta_t, the step and beta to the nodes (Alg. 1, line 2)."""
        progress, template = self._progress, self._template
        if progress is None or template is None:
            progress = self._fresh(arrays, server_round, {})
            template = self._begin(progress)
        step = progress.step = server_round + self._offset - 1
        progress.arrays = arrays
        if self.output == "uniform" and step == self._output_index(progress):
            progress.kept = arrays
        due = step % self.checkpoint_every == 0
        if due and step > self._offset:
            self._save(progress)
        cohort = self._gather(grid, step)
        log(INFO, "configure_train: %s", cohort)
        rate, momentum = self._rates(step)
        # These are of known types; Flower's checks of every entry take a twentieth of a
        # small round.
        entries = {
            **config,
            "server-round": step + 1,
            "step": step,
            "momentum": momentum,
            "session": progress.session,
            # The step before this one may have to be taken up again.
            "anchor": due,
        }
        asked = refilled(ConfigRecord(), entries)
        content = RecordDict(
            {self.arrayrecord_key: arrays, self.configrecord_key: asked}
        )
        messages = self._messages(content, cohort.nodes, MessageType.TRAIN)
        self._round = Round(
            arrays, template, messages, cohort.num_malicious, rate, momentum
        )
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Screen and aggregate momentums, and take a step (Alg. 1, lines 9 and 10)."""
        progress = self._progress
        if progress is None or self._round is None:
            raise RuntimeError(
                "aggregate_train needs configure_train to come before it"
            )
        outcome = conclude(self._round, self.aggregation, replies)
        metrics = refilled(MetricRecord(), outcome.metrics)
        progress.step += 1
        if outcome.arrays is not None:
            progress.arrays = outcome.arrays
        progress.train[progress.step] = metrics
        return outcome.arrays, metrics

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
        return self._messages(content, chosen, MessageType.EVALUATE)

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

    def _gather(self, grid: Grid, step: int) -> Cohort:
        try:
            return self.participation.gather(grid, lambda: self._rng(_NODES, step))
        except ValueError as error:
            if step == self._offset:
                raise
            # Nodes that leave must not be able to end a run.
            log(WARNING, "Round skipped: %s", error)
            return Cohort([], self.num_malicious_nodes, 1.0)

    def _messages(
        self, content: RecordDict, nodes: list[int], message_type: str
    ) -> list[Message]:
        return [
            Message(content, dst_node_id=node, message_type=message_type, ttl=self._ttl)
            for node in nodes
        ]

    def _rng(self, purpose: int, step: int = 0) -> np.random.Generator:
        # By step and not by state, so that a resumed run chooses the same.
        return np.random.default_rng([self.seed, purpose, step])

    def _output_index(self, progress: Progress) -> int:
        return int(self._rng(_OUTPUT).integers(progress.num_rounds))

    def _fresh(
        self, arrays: ArrayRecord, num_rounds: int, settings: Settings
    ) -> Progress:
        return Progress(
            secrets.token_hex(8), self.seed, num_rounds, 0, arrays, settings=settings
        )

    def _begin(self, progress: Progress) -> Template:
        self._progress = progress
        self._offset = progress.step
        self._template = template = Template.of(progress.arrays)
        self.seed = progress.seed
        return template

    def _save(self, progress: Progress) -> None:
        if self.checkpoint is not None:
            save(self.checkpoint, progress)

    def _settings(
        self, initial: ArrayRecord, num_rounds: int, **configs: ConfigRecord | None
    ) -> Settings:
        """Return all that decides what a run computes, as JSON values."""
        if num_rounds < 0:
            raise ValueError(f"num_rounds={num_rounds} must be at least 0")
        arguments = inspect.signature(SafeDSHB.__init__).parameters
        rates = [self._rates(step) for step in range(num_rounds)]
        return {
            **{k: described(getattr(self, k)) for k in arguments if k not in _HANDLING},
            **{name: described(config or {}) for name, config in configs.items()},
            # Their values: a function's name does not say what it returns.
            "server_learning_rate": compact([rate for rate, _ in rates]),
            "momentum": compact([momentum for _, momentum in rates]),
            "strategy": type(self).__name__,
            "num_rounds": num_rounds,
            "model": {k: f"{a.dtype}{list(a.shape)}" for k, a in initial.items()},
            "initial_arrays": fingerprint(initial),
        }

    def _resumed(
        self, initial: ArrayRecord, num_rounds: int, settings: Settings
    ) -> Progress:
        """Return the progress of the checkpoint if there is one."""
        if self.checkpoint is None:
            return self._fresh(initial, num_rounds, settings)
        # Without a seed of its own a run takes that of the checkpoint.
        any_seed = {} if self._seeded else {"seed": None}
        found = past_of(self.checkpoint, {**settings, **any_seed})
        if found is None:
            return self._fresh(initial, num_rounds, settings)
        log(INFO, "Resuming from %s after round %d", self.checkpoint, found.step)
        return found

    def _rates(self, step: int) -> tuple[float, float]:
        """Return gamma_t and the beta that clients use in step t."""
        return rates_at(self.server_learning_rate, self.momentum, step)
