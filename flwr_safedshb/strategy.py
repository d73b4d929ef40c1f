"""Safe-DSHB, the server's half, as a Flower strategy.

Allouah, Guerraoui, Gupta, Pinot, Stephan: "On the Privacy-Robustness-Utility Trilemma
in Distributed Learning", ICML 2023, Algorithm 1. Clients send momentums of private
gradients; the server aggregates them robustly and takes a step:
theta_{t+1} = theta_t - gamma_t R_t.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.aggregation.rule import Rule
from flwr_safedshb.algorithm.norm_bound import NormBound
from flwr_safedshb.algorithm.output import Output
from flwr_safedshb.algorithm.participation import warn_of_open_network
from flwr_safedshb.algorithm.progress import EvaluateFn, RunResult, StopRun
from flwr_safedshb.algorithm.round_record import Receipts
from flwr_safedshb.algorithm.run import RecordKeys, TrainingRun
from flwr_safedshb.algorithm.schedules import Schedule
from flwr_safedshb.algorithm.settings import StopWhen, StrategySettings
from flwr_safedshb.flower.grid import FaultTolerantGrid, Patience, SimulatedGrid

_SETTINGS = frozenset(field.name for field in fields(StrategySettings))


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
    output : {"last", "uniform", "average"}
        Return theta_T, or one of theta_0 .. theta_{T-1} drawn uniformly up front, or
        the mean of the last half of theta_1 .. theta_T.
    local_steps : int
        K, steps that a node takes on its own in a round, each charged. It sends the
        mean of its K momentums, and the server takes K steps in that direction. Rates
        are those of the first step. Safe-DSHB is K = 1.
    evaluate_every : int, optional
        Let all nodes evaluate the model privately every so many rounds, and at the end
        the model that is returned. Clients with a `PrivateEvaluation` answer, and are
        charged.
    evaluate_max_loss, evaluate_per_class : float, bool
        Losses count up to this value; and whether to count by class, too.
    noise_std : float, optional
        sigma_DP of the clients' plan (`PrivacyPlan.noise_std`), where it is public: the
        metrics of a round then hold estimates of how far honest clients differ. Nothing
        else depends on it.
    norm_bound : NormBound, optional
        The largest clip and noise of the clients' plans, where they are public: a reply
        that is longer than any honest one can be then proves an adversary, and is
        excluded.
    fraction_train : float
        Share of the nodes in a round. Below 1 the number of adversaries among them is
        bounded so that the bounds of all rounds of the run hold with probability
        `participation_confidence`; a share that may have no honest majority is refused.
        A run that is resumed for more rounds after its end spends that risk once more.
    fraction_evaluate : float
        Share of the nodes, drawn in each round, that evaluate the model on their own
        data without noise; the metrics hold the medians. That is outside the privacy
        guarantee, so the default is 0.
    min_train_nodes, min_evaluate_nodes, min_available_nodes : int
        Least numbers of nodes; by default 2f + 1, so that f of them are a minority.
    node_timeout : float
        Seconds to wait for `min_available_nodes` before giving up.
    give_up_after : float
        Seconds after which a run ends if all its rounds were skipped for lack of nodes.
    straggler_grace : float
        Seconds for which the last f nodes of a round are waited for, once the others,
        more than 2f, have answered; or as long as those took, if that is longer. Who
        has not answered by then counts as absent. Of `start`, ``timeout`` bounds the
        whole round.
    participation_confidence : float
        See `fraction_train`.
    authenticated_nodes : bool
        Confirm that the SuperLink admits registered SuperNodes only, which a strategy
        cannot see: where anybody may join, f means nothing.
    receipts : {None, "gram", "momentums"}
        Let every node sign its steps, and record the run beside the checkpoint, so that
        ``safedshb verify`` can check it: with the momentums (n + 1 times the bytes of
        the model a round), or with their Gram matrix alone, whose values are then the
        server's word.
    foreign_clients : bool
        Accept replies without the tag of a `SafeDSHBClient`, from clients of your own
        that send momentums. By default a run ends if more nodes send no tag than can be
        adversaries: trained weights must not be taken for momentums.
    seed : int, optional
        Of the server's random choices; by default from the operating system.
    checkpoint : str or Path, optional
        File to write, and to resume from if it exists. It holds what identifies the
        run: with other arguments, here or of `start`, it is refused; only more rounds
        may be asked for, with output "last" and the same rates. If the first model was
        random and is lost, pass the ``arrays`` of ``load_checkpoint(path)`` to `start`.
    checkpoint_every : int
        Write the checkpoint every so many rounds, and after the last.
    stop_when : callable (round, metrics) -> bool, optional
        End the run after a round for whose metrics, of training and evaluation, this
        returns True.
    run_settings : mapping, optional
        Whatever else identifies the run, such as Flower's ``context.run_config``: the
        checkpoint holds it, and is refused with another.
    arrayrecord_key, configrecord_key : str
        Keys of the records in a message; for NumPyClients behind
        ``ClientApp(client_fn=...)`` use ``"fitins.parameters"`` and
        ``"fitins.config"``.
    """

    def __init__(
        self,
        aggregation: Rule | None = None,
        num_malicious_nodes: int = 0,
        server_learning_rate: Schedule = 1.0,
        momentum: Schedule = 0.99,
        output: Output = "last",
        *,
        local_steps: int = 1,
        evaluate_every: int | None = None,
        evaluate_max_loss: float = 4.0,
        evaluate_per_class: bool = False,
        noise_std: float | None = None,
        norm_bound: NormBound | None = None,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 0.0,
        min_train_nodes: int | None = None,
        min_evaluate_nodes: int | None = None,
        min_available_nodes: int | None = None,
        node_timeout: float = 600.0,
        give_up_after: float = 3600.0,
        straggler_grace: float = 60.0,
        participation_confidence: float = 0.999,
        authenticated_nodes: bool = False,
        foreign_clients: bool = False,
        receipts: Receipts | None = None,
        seed: int | None = None,
        checkpoint: str | Path | None = None,
        checkpoint_every: int = 1,
        stop_when: StopWhen | None = None,
        run_settings: Mapping[str, object] | None = None,
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
    ) -> None:
        self.settings = StrategySettings(
            aggregation=SMEA() if aggregation is None else aggregation,
            num_malicious_nodes=num_malicious_nodes,
            server_learning_rate=server_learning_rate,
            momentum=momentum,
            output=output,
            local_steps=local_steps,
            evaluate_every=evaluate_every,
            evaluate_max_loss=evaluate_max_loss,
            evaluate_per_class=evaluate_per_class,
            noise_std=noise_std,
            norm_bound=norm_bound,
            fraction_train=fraction_train,
            fraction_evaluate=fraction_evaluate,
            min_train_nodes=min_train_nodes,
            min_evaluate_nodes=min_evaluate_nodes,
            participation_confidence=participation_confidence,
            foreign_clients=foreign_clients,
            receipts=receipts,
            seed=seed,
            run_settings=run_settings,
            min_available_nodes=min_available_nodes,
            node_timeout=node_timeout,
            give_up_after=give_up_after,
            straggler_grace=straggler_grace,
            authenticated_nodes=authenticated_nodes,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            stop_when=stop_when,
        )
        part = self.settings.participation
        super().__init__(
            fraction_train=fraction_train,
            min_train_nodes=part.min_train_nodes,
            min_evaluate_nodes=cast(int, self.settings.min_evaluate_nodes),
            min_available_nodes=part.min_available_nodes,
            arrayrecord_key=arrayrecord_key,
            configrecord_key=configrecord_key,
        )
        # Set afterwards, because FedAvg warns of 0.
        self.fraction_evaluate = fraction_evaluate
        keys = RecordKeys(arrayrecord_key, configrecord_key)
        self.run = TrainingRun(self.settings, keys, type(self).__name__)

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse to change a setting of a made strategy, which would do nothing."""
        if name in _SETTINGS and "run" in vars(self):
            raise AttributeError(
                f"{name} is fixed once the strategy is made; make it with "
                f"{type(self).__name__}({name}=...)"
            )
        super().__setattr__(name, value)

    def summary(self) -> None:
        """Log the settings of the strategy."""
        self.settings.log_summary(self.arrayrecord_key, self.configrecord_key)

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
        """Run T = `num_rounds` rounds of Algorithm 1, or those that are left.

        Arguments and result are those of every Flower strategy; the result also lists
        the skipped rounds and has the privacy card, which is written beside the
        checkpoint. A resumed run continues its round numbers.

        Raises
        ------
        NothingTrainedError
            If all rounds of the run were skipped.
        """
        settings, run = self.settings, self.run
        patience = Patience(settings.num_malicious_nodes, settings.straggler_grace)
        if settings.num_malicious_nodes > 0:
            warn_of_open_network(
                grid, settings.num_malicious_nodes, settings.authenticated_nodes
            )
        configs = {"train_config": train_config, "evaluate_config": evaluate_config}
        progress = run.begin(initial_arrays, num_rounds, timeout, **configs)
        with suppress(StopRun), run.name_interruption():
            super().start(
                # A simulated Grid loses no reply because of another.
                grid
                if isinstance(grid, SimulatedGrid)
                else FaultTolerantGrid(grid, patience),
                progress.arrays,
                num_rounds - run.rounds_done,
                timeout,
                train_config,
                evaluate_config,
                evaluate_fn
                and progress.record_evaluations(evaluate_fn, run.rounds_done),
            )
        return RunResult(
            run.finish(),
            progress.train,
            progress.evaluate_clientapp,
            progress.evaluate_serverapp,
            progress.skipped_rounds,
            run.card,
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send theta_t, the step and beta to this round's nodes (Alg. 1, line 2)."""
        return self.run.plan_round(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the momentums and take a step (Alg. 1, lines 9 and 10)."""
        return self.run.finish_round(replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send the model to the nodes that evaluate it, if the settings ask for it."""
        return self.run.plan_evaluation(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Aggregate what nodes answered about the model; no node is trusted."""
        return self.run.finish_evaluation(server_round, replies)

    def initialize_parameters(self, client_manager: object) -> None:
        """Refuse a server of Flower's legacy API, which calls this first."""
        raise TypeError(
            "ServerAppComponents needs a strategy of the older kind; say "
            f"strategy=ClassicStrategy({type(self).__name__}(...), initial)"
        )
