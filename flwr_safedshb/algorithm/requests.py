"""Parse and check a server's requests to train and to evaluate.

Nothing in a request can weaken privacy: clip norm, noise, batch size and sampler are
the node's own settings. An invalid request is refused before anything is charged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard, cast

from flwr_safedshb.algorithm import wire
from flwr_safedshb.algorithm.refusal import RefusedError
from flwr_safedshb.algorithm.wire import Arrays, Template
from flwr_safedshb.privacy.accounting.ranges import MAX_STEPS
from flwr_safedshb.sanitize import SAFE_NAME

Config = Mapping[str, object]


@dataclass(frozen=True)
class RunLength:
    """The most steps and private evaluations that a run takes, as the server states.

    The ledger is committed to these counts, so the guarantee holds if the server lies.
    """

    steps: int
    evaluations: int


@dataclass(frozen=True)
class TrainRequest:
    """A validated training message.

    Attributes
    ----------
    session : str
        Name of the run; momentum is kept per session.
    step : int
        t, the first of `local_steps` steps.
    momentum : float
        beta, in [0, 1).
    checkpointed : bool
        Whether the server may resume the run from this step, so that the momentum
        before it must be kept.
    local_steps : int
        K. The reply is the mean of the K momentums.
    learning_rate : float
        gamma, used between local steps only; 0 if the message does not say.
    report_privacy : bool
        Whether the reply states the epsilon of the run.
    sign_receipt : bool
        Whether the reply has a receipt.
    run : RunLength, optional
    """

    session: str
    step: int
    momentum: float
    checkpointed: bool = True
    local_steps: int = 1
    learning_rate: float = 0.0
    report_privacy: bool = False
    sign_receipt: bool = False
    run: RunLength | None = None

    @property
    def last_step(self) -> int:
        """The last of the local steps."""
        return self.step + self.local_steps - 1


@dataclass(frozen=True)
class EvaluateRequest:
    """A validated message that asks for a private evaluation.

    Attributes
    ----------
    session : str
    number : int
        The round.
    max_loss : float
        Losses count up to this value.
    per_class : bool
    run : RunLength, optional
    """

    session: str
    number: int
    max_loss: float
    per_class: bool
    run: RunLength | None = None


def parse_train_request(config: Config, run_id: int) -> TrainRequest:
    """Return the training request in the config of a message.

    Raises
    ------
    RefusedError
        If a value is missing or out of range.
    """
    step, beta = config.get("step"), config.get("momentum")
    if not _is_count(step):
        raise RefusedError(
            "the message must have step, an integer of at least 0, which the strategy "
            "SafeDSHB sends; another strategy would aggregate momentums as weights"
        )
    if not isinstance(beta, float | int) or not 0.0 <= beta < 1.0:
        raise RefusedError("the message must have momentum, a number in [0, 1)")
    local_steps, rate = _parse_local_steps(config)
    return TrainRequest(
        session=_parse_session(config, run_id),
        step=step,
        momentum=float(beta),
        checkpointed=bool(config.get(wire.CHECKPOINTED, True)),
        local_steps=local_steps,
        learning_rate=rate,
        report_privacy=bool(config.get(wire.REPORT_PRIVACY, False)),
        sign_receipt=bool(config.get(wire.SIGN_RECEIPT, False)),
        run=_parse_run_length(config),
    )


def parse_evaluate_request(config: Config, run_id: int) -> EvaluateRequest:
    """Return the private evaluation that the config of a message asks for.

    Raises
    ------
    RefusedError
        If a value is missing or out of range.
    """
    number, max_loss = config.get(wire.PRIVATE_EVALUATION), config.get(wire.MAX_LOSS)
    if not _is_count(number, 2**40 - 1):
        raise RefusedError(
            f"the message must have {wire.PRIVATE_EVALUATION}, a round's number"
        )
    low, high = wire.MAX_LOSS_RANGE
    if not isinstance(max_loss, int | float) or not low <= max_loss <= high:
        raise RefusedError(
            f"the message must have {wire.MAX_LOSS}, from {low:g} to {high:g}"
        )
    return EvaluateRequest(
        session=_parse_session(config, run_id),
        number=number,
        max_loss=float(max_loss),
        per_class=bool(config.get(wire.PER_CLASS)),
        run=_parse_run_length(config),
    )


def check_weights(weights: Arrays, template: Template) -> None:
    """Refuse weights that do not fit the model of this client.

    Raises
    ------
    RefusedError
        If a shape differs, or a type is not numeric.
    """
    shapes, own = [array.shape for array in weights], [*template.shapes]
    if shapes != own:
        raise RefusedError(
            f"the message has arrays of shapes {shapes}, and the model of this client "
            f"trains {own}; use the same model on both sides, and start the run from "
            "trained_arrays(model)"
        )
    for array in weights:
        dtype = array.dtype
        if dtype.kind not in "fiub" or not dtype.isnative or dtype.itemsize > 8:
            raise RefusedError(
                f"the message has an array of dtype {dtype}, and weights are floats of "
                "at most 64 bits"
            )


def _parse_session(config: Config, run_id: int) -> str:
    session = config.get("session", str(run_id))
    if not isinstance(session, str) or not SAFE_NAME.fullmatch(session):
        raise RefusedError(
            "the message's session must be up to 64 letters, digits, '.', '_', '-'"
        )
    return session


def _parse_run_length(config: Config) -> RunLength | None:
    """Return the length of the run, if the message states it."""
    if wire.RUN_STEPS not in config and wire.RUN_EVALUATIONS not in config:
        return None
    steps, evaluations = (
        config.get(name, 0) for name in (wire.RUN_STEPS, wire.RUN_EVALUATIONS)
    )
    if not (_is_count(steps, MAX_STEPS) and _is_count(evaluations, MAX_STEPS)):
        raise RefusedError(
            f"the message's {wire.RUN_STEPS} and {wire.RUN_EVALUATIONS} must be "
            f"integers from 0 to {MAX_STEPS}"
        )
    return RunLength(steps, evaluations)


def _parse_local_steps(config: Config) -> tuple[int, float]:
    """Return K and gamma; one step by default, which needs no gamma."""
    count, rate = config.get(wire.LOCAL_STEPS, 1), config.get(wire.LEARNING_RATE, 0.0)
    if not _is_count(count, wire.MAX_LOCAL_STEPS) or count < 1:
        raise RefusedError(
            f"the message's {wire.LOCAL_STEPS} must be an integer from 1 to "
            f"{wire.MAX_LOCAL_STEPS}"
        )
    known = isinstance(rate, float | int) and 0.0 < rate < math.inf
    if count == 1 and not known:
        return 1, 0.0
    if not known:
        raise RefusedError(
            f"the message's {wire.LEARNING_RATE} must be finite and above 0"
        )
    return count, float(cast(float, rate))


def _is_count(value: object, most: int = 2**62) -> TypeGuard[int]:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and 0 <= cast(int, value) <= most
