"""The state of a run on the server, its result, and the exceptions that end it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result

if TYPE_CHECKING:
    from flwr_safedshb.algorithm.privacy_card import PrivacyCard

History = dict[int, MetricRecord]
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass
class Progress:
    """A run of the server after `step` steps.

    Attributes
    ----------
    session : str
        Name of the run; clients keep their momentum under it.
    seed : int
        Seeds the server's random choices.
    num_rounds : int
        T.
    step : int
        Steps done (t).
    arrays : ArrayRecord
        theta_t.
    kept : ArrayRecord or None
        For ``output="uniform"`` the model to return, once that round is reached; for
        ``"average"`` the mean so far, in float64.
    train, evaluate_clientapp, evaluate_serverapp : dict of round to MetricRecord
        Metrics of the rounds so far.
    settings : dict of str to JSON values
        The run's identity; see `identify_run`.
    """

    session: str
    seed: int
    num_rounds: int
    step: int
    arrays: ArrayRecord
    kept: ArrayRecord | None = None
    train: History = field(default_factory=dict)
    evaluate_clientapp: History = field(default_factory=dict)
    evaluate_serverapp: History = field(default_factory=dict)
    settings: dict[str, object] = field(default_factory=dict)

    @classmethod
    def fresh(
        cls,
        seed: int,
        num_rounds: int,
        arrays: ArrayRecord,
        settings: dict[str, object],
    ) -> Progress:
        """Return the progress of a run that has not begun."""
        session = secrets.token_hex(8)
        return cls(session, seed, num_rounds, 0, arrays, settings=settings)

    @property
    def skipped_rounds(self) -> list[int]:
        """The rounds so far that took no step."""
        return [number for number, found in self.train.items() if found.get("skipped")]

    def record_evaluations(self, evaluate_fn: EvaluateFn, offset: int) -> EvaluateFn:
        """Wrap the user's function to continue round numbers and record its results."""

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            number = server_round + offset
            if number not in self.evaluate_serverapp:
                metrics = evaluate_fn(number, arrays)
                if metrics is None:
                    return None
                if not isinstance(metrics, MetricRecord | dict):
                    raise TypeError(
                        f"evaluate_fn returns a {type(metrics).__name__}; return a "
                        "MetricRecord, as in MetricRecord({'accuracy': 0.9})"
                    )
                self.evaluate_serverapp[number] = MetricRecord({**metrics})
            return self.evaluate_serverapp[number]

        return evaluate


class NothingTrainedError(RuntimeError):
    """Raised at the end of a run none of whose rounds took a step.

    Attributes
    ----------
    metrics : dict of int to MetricRecord
        The metrics of the rounds.
    """

    def __init__(self, metrics: History) -> None:
        super().__init__(
            f"nothing was trained: all {len(metrics)} rounds were skipped; "
            "the log says why, and failing-nodes in the metrics names the nodes that "
            "failed: repair them, or add others, and start a new run"
        )
        self.metrics = metrics


@dataclass(repr=False)
class RunResult(Result):
    """What `SafeDSHB.start` returns: Flower's `Result`, skipped rounds, privacy card.

    Attributes
    ----------
    skipped_rounds : list of int
        The rounds that took no step.
    card : PrivacyCard or None
        What is known about the privacy of the run; see `privacy_card`.
    """

    skipped_rounds: list[int] = field(default_factory=list)
    card: PrivacyCard | None = None

    def __repr__(self) -> str:
        """Return Flower's text, followed by the skipped rounds."""
        skipped, rounds = len(self.skipped_rounds), len(self.train_metrics_clientapp)
        return f"{super().__repr__()}\n{skipped} of {rounds} rounds skipped\n"


class StopRun(Exception):  # noqa: N818  # not an error
    """Raised to end a run whose work is done."""
