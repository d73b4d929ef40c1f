"""Safe-DSHB, the server's half, as a Flower strategy.

Allouah, Guerraoui, Gupta, Pinot, Stephan: "On the Privacy-Robustness-Utility Trilemma
in Distributed Learning", ICML 2023, Algorithm 1. Clients send momentums of private
gradients; the server aggregates them robustly and takes a step:
theta_{t+1} = theta_t - gamma_t R_t.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from flwr_safedshb.aggregation.rule import Rule
from flwr_safedshb.algorithm.norm_bound import NormBound
from flwr_safedshb.algorithm.output import Output, check_output
from flwr_safedshb.algorithm.participation import Participation
from flwr_safedshb.algorithm.plain_evaluation import least_evaluators
from flwr_safedshb.algorithm.private_evaluation import private_evaluations
from flwr_safedshb.algorithm.resumable import StopWhen
from flwr_safedshb.algorithm.round import Rounds
from flwr_safedshb.algorithm.schedules import Schedule, rates_at
from flwr_safedshb.algorithm.settings import (
    check_local_steps,
    check_numbers,
    log_settings,
    rule_of,
)


class SafeDSHB(Rounds):
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
        mean of its K momentums, and the server takes K steps that way. Rates are those
        of the first. Safe-DSHB is K = 1.
    evaluate_every : int, optional
        Ask all nodes what the model is worth, after so many rounds, and at the end of
        the one returned. Clients with a `PrivateEvaluation` answer, and are charged.
    evaluate_max_loss, evaluate_per_class : float, bool
        The greatest loss that counts, and whether to count by class, too.
    noise_std : float, optional
        sigma_DP of the clients' plan (`PrivacyPlan.noise_std`), where it is public: the
        metrics of a round then hold estimates of how far honest clients differ. Nothing
        else depends on it.
    norm_bound : NormBound, optional
        The largest clip and noise of the clients' plans, where they are public: a reply
        that is longer than any honest one can be then proves an adversary, and is
        excluded.
    fraction_train : float
        Share of the nodes in a round. Below 1 the adversaries among them are bounded,
        so that the bounds of all rounds of the run hold with probability
        `participation_confidence`; a share that may have no honest majority is refused.
        A run that is given more rounds after its end may fail as often once more.
    fraction_evaluate : float
        Share of the nodes, drawn in each round, that evaluate the model on their own
        data; the medians of what they report are known. That is outside the privacy
        guarantee, so the default is none of them.
    min_train_nodes, min_evaluate_nodes, min_available_nodes : int
        Least numbers of nodes; by default 2f + 1, the least that f can be among.
    node_timeout : float
        Seconds to wait for `min_available_nodes` before giving up.
    give_up_after : float
        Seconds after which a run ends if all rounds were skipped for want of nodes.
    participation_confidence : float
        See `fraction_train`.
    authenticated_nodes : bool
        Say that the SuperLink admits registered SuperNodes only, which a strategy
        cannot see: where anybody may join, f means nothing.
    foreign_clients : bool
        Take replies without the mark of a `SafeDSHBClient`, from clients of your own
        that send momentums. Otherwise a run ends where more nodes leave it out than can
        be adversaries: trained weights, say, are no momentums.
    seed : int, optional
        Of the server's random choices; by default from the operating system.
    checkpoint : str or Path, optional
        File to resume from if it is there, and to write to. It holds what made the run:
        with other arguments, here or of `start`, it is refused; only more rounds may be
        asked for, with output "last" and the same rates. If the first model was random
        and is gone, give `start` the ``arrays`` of ``load_checkpoint(path)``.
    checkpoint_every : int
        Write it after so many rounds, and after the last.
    stop_when : callable (round, metrics) -> bool, optional
        End the run after a round whose metrics, of training and evaluation, are such.
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
        participation_confidence: float = 0.999,
        authenticated_nodes: bool = False,
        foreign_clients: bool = False,
        seed: int | None = None,
        checkpoint: str | Path | None = None,
        checkpoint_every: int = 1,
        stop_when: StopWhen | None = None,
        run_settings: Mapping[str, object] | None = None,
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
    ) -> None:
        check_output(output, stop_when is not None)
        check_local_steps(local_steps)
        check_numbers(
            num_malicious_nodes, checkpoint_every, fraction_evaluate, noise_std
        )
        self.evaluations = private_evaluations(
            evaluate_every, evaluate_max_loss, evaluate_per_class, fraction_evaluate
        )
        least = 2 * num_malicious_nodes + 1
        self.participation = Participation(
            num_malicious_nodes,
            fraction_train,
            least if min_train_nodes is None else min_train_nodes,
            least if min_available_nodes is None else min_available_nodes,
            participation_confidence,
            node_timeout,
            give_up_after,
        )
        super().__init__(
            fraction_train=fraction_train,
            min_train_nodes=self.participation.min_train_nodes,
            min_evaluate_nodes=least_evaluators(
                min_evaluate_nodes, num_malicious_nodes
            ),
            min_available_nodes=self.participation.min_available_nodes,
            arrayrecord_key=arrayrecord_key,
            configrecord_key=configrecord_key,
        )
        # Set afterwards: to evaluate nowhere is the default here, and no warning.
        self.fraction_evaluate = fraction_evaluate
        self.aggregation = rule_of(aggregation)
        self.num_malicious_nodes = num_malicious_nodes
        self.server_learning_rate = server_learning_rate
        self.momentum = momentum
        self.output: Output = output
        self.local_steps = local_steps
        self.evaluate_every = evaluate_every
        self.evaluate_max_loss = evaluate_max_loss
        self.evaluate_per_class = evaluate_per_class
        self.noise_std = noise_std
        self.norm_bound = norm_bound
        self.authenticated_nodes = authenticated_nodes
        self.foreign_clients = foreign_clients
        self.seed = secrets.randbits(63) if seed is None else seed
        self._seeded = seed is not None
        self.participation_confidence = participation_confidence
        self.stop_when = stop_when
        self.run_settings = dict(run_settings or {})
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self.checkpoint_every = checkpoint_every
        # Of all steps of the running run; the first is checked at once.
        self._rates = [rates_at(server_learning_rate, momentum, 0)]

    def summary(self) -> None:
        """Log the settings of the strategy."""
        log_settings(self)
