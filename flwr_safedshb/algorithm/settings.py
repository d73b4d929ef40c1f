"""The settings of the Safe-DSHB strategy, checked and logged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from logging import INFO, WARNING
from pathlib import Path
from typing import cast, get_args

import numpy as np
from flwr.app import ArrayRecord
from flwr.common import log

from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.aggregation.gram import GramRule
from flwr_safedshb.aggregation.rule import Rule
from flwr_safedshb.algorithm.norm_bound import NormBound
from flwr_safedshb.algorithm.output import Output, check_output
from flwr_safedshb.algorithm.participation import Participation
from flwr_safedshb.algorithm.plain_evaluation import check_min_evaluators
from flwr_safedshb.algorithm.private_evaluation import EvaluationSchedule
from flwr_safedshb.algorithm.round_record import Receipts
from flwr_safedshb.algorithm.rule_names import is_named
from flwr_safedshb.algorithm.schedules import Schedule, rates_at
from flwr_safedshb.algorithm.wire import MAX_LOCAL_STEPS, decode_arrays
from flwr_safedshb.privacy.accounting.ranges import shorten_value

# Given a round's number and metrics, returns whether the run may stop.
StopWhen = Callable[[int, Mapping[str, object]], bool]

# Config entries of other strategies. A SafeDSHBClient does not read them: a step is one
# batch of the client's plan, and the learning rate is the server's.
_UNUSED = frozenset(
    [
        "batch-size",
        "epochs",
        "learning-rate",
        "local-epochs",
        "lr",
        "num-epochs",
        "optimizer",
        "proximal-mu",
        "weight-decay",
    ]
)


# Metadata of a setting that may change when a run is resumed.
_CHANGEABLE = {"identifies_run": False}


@dataclass
class StrategySettings:
    """The settings of `SafeDSHB`, which documents them.

    A run is resumed only with the settings it began with, except for fields about
    waiting, authentication, checkpoints and stopping.

    Raises
    ------
    ValueError
        If a value is out of range; it names the value and the remedy.
    """

    aggregation: Rule = field(default_factory=SMEA)
    num_malicious_nodes: int = 0
    server_learning_rate: Schedule = 1.0
    momentum: Schedule = 0.99
    output: Output = "last"
    local_steps: int = 1
    evaluate_every: int | None = None
    evaluate_max_loss: float = 4.0
    evaluate_per_class: bool = False
    noise_std: float | None = None
    norm_bound: NormBound | None = None
    fraction_train: float = 1.0
    fraction_evaluate: float = 0.0
    min_train_nodes: int | None = None
    min_evaluate_nodes: int | None = None
    participation_confidence: float = 0.999
    foreign_clients: bool = False
    receipts: Receipts | None = None
    seed: int | None = None
    run_settings: Mapping[str, object] | None = None
    min_available_nodes: int | None = field(default=None, metadata=_CHANGEABLE)
    node_timeout: float = field(default=600.0, metadata=_CHANGEABLE)
    give_up_after: float = field(default=3600.0, metadata=_CHANGEABLE)
    straggler_grace: float = field(default=60.0, metadata=_CHANGEABLE)
    authenticated_nodes: bool = field(default=False, metadata=_CHANGEABLE)
    checkpoint: str | Path | None = field(default=None, metadata=_CHANGEABLE)
    checkpoint_every: int = field(default=1, metadata=_CHANGEABLE)
    stop_when: StopWhen | None = field(default=None, metadata=_CHANGEABLE)

    def __post_init__(self) -> None:
        """Check the values and fill in those that follow from others."""
        check_output(self.output, self.stop_when is not None)
        self.local_steps = check_whole(
            "local_steps", self.local_steps, 1, MAX_LOCAL_STEPS
        )
        self.num_malicious_nodes = check_whole(
            "num_malicious_nodes", self.num_malicious_nodes
        )
        self.checkpoint_every = check_whole(
            "checkpoint_every", self.checkpoint_every, 1
        )
        if not 0.0 <= self.fraction_evaluate <= 1.0:
            raise ValueError(
                f"fraction_evaluate={self.fraction_evaluate} must be in [0, 1]"
            )
        if self.noise_std is not None and not 0.0 <= self.noise_std < np.inf:
            raise ValueError(
                f"noise_std={self.noise_std} must be finite and at least 0"
            )
        if not self.straggler_grace >= 0.0:
            raise ValueError(
                f"straggler_grace={self.straggler_grace} must be at least 0 seconds"
            )
        if not isinstance(self.aggregation, Rule):
            raise ValueError(
                f"aggregation={shorten_value(self.aggregation)} must be a rule of "
                "flwr_safedshb, such as SMEA() or Filter()"
            )
        self._check_receipts()
        self.evaluations = EvaluationSchedule.from_settings(
            self.evaluate_every,
            self.evaluate_max_loss,
            self.evaluate_per_class,
            self.fraction_evaluate,
        )
        least = 2 * self.num_malicious_nodes + 1
        if self.min_train_nodes is None:
            self.min_train_nodes = least
        if self.min_available_nodes is None:
            self.min_available_nodes = least
        self.participation = Participation(
            self.num_malicious_nodes,
            self.fraction_train,
            self.min_train_nodes,
            self.min_available_nodes,
            self.participation_confidence,
            self.node_timeout,
            self.give_up_after,
        )
        self.min_evaluate_nodes = check_min_evaluators(
            self.min_evaluate_nodes, self.num_malicious_nodes
        )
        if isinstance(self.seed, np.integer):
            self.seed = int(self.seed)
        self.run_settings = dict(self.run_settings or {})
        self.rates_in_round(0)

    def _check_receipts(self) -> None:
        """Refuse receipts that nobody could check."""
        if self.receipts is None:
            return
        if self.receipts not in get_args(Receipts):
            raise ValueError(
                f"receipts={self.receipts!r:.60} must be None, "
                + " or ".join(map(repr, get_args(Receipts)))
            )
        problem = ""
        if self.checkpoint is None:
            problem = "checkpoint, beside which they are kept"
        elif self.foreign_clients:
            problem = "foreign_clients=False: other clients sign none"
        elif self.receipts == "gram" and not isinstance(self.aggregation, GramRule):
            problem = "a rule that needs inner products only, or 'momentums'"
        elif getattr(self.aggregation, "time_limit", None) is not None:
            problem = "a rule without time_limit, whose answer depends on the machine"
        elif not is_named(self.aggregation):
            problem = "a rule of flwr_safedshb, which others have, too"
        if problem:
            raise ValueError(f"receipts={self.receipts!r} needs {problem}")

    def rates_in_round(self, number: int) -> tuple[float, float]:
        """Return gamma and beta of a round, counted from 0: those of its first step."""
        step = number * self.local_steps
        return rates_at(self.server_learning_rate, self.momentum, step)

    def identity(self) -> dict[str, object]:
        """Return the settings that identify a run."""
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.metadata.get("identifies_run", True)
        }

    def log_summary(self, arrayrecord_key: str, configrecord_key: str) -> None:
        """Log the settings, as every strategy of Flower does."""
        part = self.participation
        for line in (
            "\t├──> Safe-DSHB settings:",
            f"\t│\t├── Aggregation: {self.aggregation}",
            f"\t│\t├── Number of malicious nodes: {self.num_malicious_nodes}",
            f"\t│\t├── Server learning rate: {self.server_learning_rate}",
            f"\t│\t├── Momentum: {self.momentum}",
            f"\t│\t├── Local steps: {self.local_steps}",
            f"\t│\t├── Output: {self.output}",
            f"\t│\t└── Checkpoint: {self.checkpoint or 'none'}",
            "\t├──> Sampling:",
            f"\t│\t├── Fraction: train ({part.fraction:.2f}) | evaluate "
            f"({self.fraction_evaluate:.2f})",
            f"\t│\t└── Minimum nodes: train ({part.min_train_nodes}) | available "
            f"({part.min_available_nodes}), within {part.node_timeout:g} s",
            "\t└──> Keys in records:",
            f"\t\t├── ArrayRecord key: '{arrayrecord_key}'",
            f"\t\t└── ConfigRecord key: '{configrecord_key}'",
        ):
            log(INFO, "%s", line)


def check_whole(name: str, value: object, low: int = 0, high: int = 2**63) -> int:
    """Return an integer from `low` to `high` as Python's own, or refuse the value.

    Nodes refuse integers of numpy in a message, and JSON has none.
    """
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole:
        raise ValueError(f"{name}={shorten_value(value)} must be an integer")
    number = int(cast(int, value))
    if not low <= number <= high:
        most = f"an integer from {low} to {high}" if high < 2**63 else f"at least {low}"
        raise ValueError(f"{name}={shorten_value(value)} must be {most}")
    return number


def check_initial_arrays(initial: object) -> None:
    """Refuse initial arrays that cannot be trained, before any node spends budget.

    Raises
    ------
    ValueError
    """
    problem = ""
    if not isinstance(initial, ArrayRecord) or not initial:
        kind = "empty" if isinstance(initial, ArrayRecord) else type(initial).__name__
        problem = f"are {kind}, not an ArrayRecord with the arrays of a model"
    else:
        for name, array in zip(initial, decode_arrays(initial), strict=True):
            if array.dtype.kind != "f":
                problem = f"have {name!r} of {array.dtype}, which cannot be trained"
            elif not np.isfinite(array).all():
                problem = f"have {name!r} with values that are not finite"
            if problem:
                break
    if problem:
        raise ValueError(
            f"the initial arrays {problem}; start the run from trained_arrays(model)"
        )


def warn_of_unused_config(config: Mapping[str, object]) -> None:
    """Warn of entries of `train_config` that a SafeDSHBClient does not read."""
    unused = [key for key in config if key.lower().replace("_", "-") in _UNUSED]
    if unused:
        log(
            WARNING,
            "train_config has %s, which a SafeDSHBClient does not read: a step is one "
            "batch of the client's plan, and its rate is server_learning_rate",
            ", ".join(unused),
        )


def warn_of_no_adversaries(num_malicious: int) -> None:
    """Warn that nothing is done against adversaries."""
    if num_malicious == 0:
        log(
            WARNING,
            "num_malicious_nodes=0: NO PROTECTION FROM ADVERSARIES, a single hostile "
            "or broken node can ruin the model; set it to how many may be hostile, "
            "fewer than half",
        )


def warn_of_plain_evaluation(fraction: float) -> None:
    """Warn that evaluations without noise are outside of any privacy guarantee."""
    if fraction > 0.0:
        log(
            WARNING,
            "fraction_evaluate=%g: nodes report metrics on private data without noise, "
            "outside of their privacy guarantee, and nodes that keep a budget refuse "
            "it; use evaluate_every for private evaluations",
            fraction,
        )
