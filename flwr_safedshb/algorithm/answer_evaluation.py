"""A client that tells what a model is worth on its data, within the privacy guarantee.

Each answer is charged to the node's ledger before the data are touched, beside the
steps of training and in the same accountant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient

from flwr_safedshb.algorithm import evaluation_names as names
from flwr_safedshb.algorithm.budget import RefusedError, keep_to_budget
from flwr_safedshb.algorithm.errors import refusal
from flwr_safedshb.algorithm.step import (
    Scalar,
    Steps,
    check_shapes,
    commit,
    load,
    make_momentum_tag,
    run_length,
)
from flwr_safedshb.algorithm.wire import Arrays
from flwr_safedshb.flower.compat import check_mods
from flwr_safedshb.privacy.accounting import ranges
from flwr_safedshb.privacy.datasets import Examples
from flwr_safedshb.privacy.evaluation import (
    Counts,
    Question,
    Right,
    is_right,
    private_counts,
)
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.sanitize import SAFE_NAME

Metrics = dict[str, int | float | list[int] | list[float]]

_STATE = "safedshb-evaluations"
# Seeded noise of evaluations is that of steps which no run takes.
_STEP_OF_NOISE = 2**40
_MAX_CLASSES = 10_000


@dataclass(frozen=True)
class PrivateEvaluation:
    """Whether and how a client evaluates models on its data.

    Attributes
    ----------
    noise_multiplier : float
        Noise of an answer, in units of what one example can change in it.
    held_out : int
        How many examples of the dataset are held out of training, and evaluated alone.
        With 0 all train, all are evaluated, and each pays for both.
    num_classes : int, optional
        Of the task; without it no answer is by class.
    right : callable (outputs, target) -> bool
        Whether the outputs for one example are right; by default, whether the largest
        is that of the target.
    """

    noise_multiplier: float
    held_out: int = 0
    num_classes: int | None = None
    right: Right = field(default=is_right)

    def __post_init__(self) -> None:
        noise = self.noise_multiplier
        ranges.NOISE_MULTIPLIER.check("noise_multiplier", noise)
        for name, least, most in (
            ("held_out", 0, ranges.MAX_EXAMPLES),
            ("num_classes", 2, _MAX_CLASSES),
        ):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is None and name == "num_classes":
                continue
            if not whole or not least <= value <= most:
                raise ValueError(
                    f"{name}={ranges.shorten(value)} must be an integer from {least} "
                    f"to {most}"
                )

    def plan(self, num_examples: int) -> PrivacyPlan:
        """Return the plan of one answer about so many examples."""
        return PrivacyPlan(
            1.0, self.noise_multiplier, num_examples, num_examples, sampling="whole"
        )


@dataclass(frozen=True)
class Evaluator:
    """What a client evaluates models with: its settings, its data, and its plan."""

    settings: PrivateEvaluation
    dataset: Examples
    plan: PrivacyPlan

    def released(self, context: Context) -> tuple[tuple[PrivacyPlan, int], ...]:
        """Return what a simulation without a ledger has answered so far."""
        record = context.state.get(_STATE)
        if not isinstance(record, ConfigRecord):
            return ()
        return ((self.plan, cast(int, record["count"])),)


def answer(
    client: Steps, message: Message, arrays: Arrays, config: Mapping[str, Scalar]
) -> Message:
    """Reply with what a client says of a model; with noise, if that is asked for."""
    own = names.PRIVATE not in config
    said = (_own_answer if own else private_answer)(client, arrays, config)
    return Message(RecordDict({"metrics": MetricRecord(said)}), reply_to=message)


def _own_answer(client: Steps, arrays: Arrays, config: Mapping[str, Scalar]) -> Metrics:
    """Return what a client's own ``evaluate`` says, which nothing protects."""
    if type(client).evaluate is NumPyClient.evaluate:
        raise RefusedError("this client does not evaluate models on its data")
    # Not those of the message itself: a client of one's own may write to them.
    copies = [array.copy() for array in arrays]
    loss, count, more = client.evaluate(copies, dict(config))
    numbers = {k: v for k, v in more.items() if isinstance(v, int | float)}
    return {**numbers, "loss": loss, "num-examples": count}


def private_answer(
    client: Steps, parameters: Arrays, config: Mapping[str, object]
) -> Metrics:
    """Answer what a model is worth on the data, within the privacy guarantee.

    Raises
    ------
    RefusedError
    """
    if (reason := check_mods(client.trusted_mods)) is not None:
        raise RefusedError(reason)
    try:
        return {**evaluate(client, parameters, config), **make_momentum_tag()}
    except BaseException as error:
        refused = refusal(error)
    raise refused


def evaluate(
    client: Steps, parameters: Arrays, config: Mapping[str, object]
) -> Metrics:
    """Answer what a model is worth; charged first, and refused where it does not fit.

    Parameters
    ----------
    client : Steps
    parameters : list of arrays
        theta.
    config : mapping
        ``private-evaluation``, the number of the round, ``max-loss``, ``per-class`` and
        ``session``. Whatever they are, the answer is as private.
    """
    check_shapes(client, parameters)
    evaluator = client.evaluator
    if evaluator is None:
        raise RefusedError("this client does not evaluate models on its data")
    number, session, question = _asked(client, evaluator, config)
    if evaluator.dataset.like is not None:
        client.gradients.prepare(*evaluator.dataset.like)
    if client.ledger is not None:
        commit(client, session, run_length(config))
        client.ledger.charge(evaluator.plan, 1, session)
    else:
        _count(client, evaluator)
    load(client.trained, parameters)
    node = int(client.context.node_config.get("partition-id", client.context.node_id))
    counts = private_counts(
        (client.model, client.loss),
        evaluator.dataset,
        evaluator.plan,
        client.randomness.for_step(node, _STEP_OF_NOISE + number),
        question,
        evaluator.settings.right,
    )
    return reported(counts, evaluator.plan.num_examples)


def _count(client: Steps, evaluator: Evaluator) -> None:
    """Keep a simulation without a ledger to its budget, evaluations included."""
    so_far = evaluator.released(client.context)
    count = so_far[0][1] if so_far else 0
    steps = _steps_of(client)
    others = ((client.plan, steps),) if steps else ()
    keep_to_budget(evaluator.plan, client.max_epsilon, client.delta, count, others)
    client.context.state[_STATE] = ConfigRecord({"count": count + 1})


def _steps_of(client: Steps) -> int:
    """Return how many steps a simulated client has taken, by the momentum it keeps."""
    record = client.context.state.get("safedshb")
    steps = record["steps"] if isinstance(record, ConfigRecord) else None
    return cast(list[int], steps)[0] + 1 if steps else 0


def _asked(
    client: Steps, evaluator: Evaluator, config: Mapping[str, object]
) -> tuple[int, str, Question]:
    """Return what a message asks for, or refuse it before anything is charged."""
    number, greatest = config.get(names.PRIVATE), config.get(names.MAX_LOSS)
    session = config.get("session", str(client.context.run_id))
    if (
        isinstance(number, bool)
        or not isinstance(number, int)
        or not 0 <= number < 2**40
    ):
        raise RefusedError(f"the message must have {names.PRIVATE}, a round's number")
    if not isinstance(session, str) or not SAFE_NAME.fullmatch(session):
        raise RefusedError("the message's session must be a plain name")
    low, high = names.MIN_MAX_LOSS, names.MAX_MAX_LOSS
    if not isinstance(greatest, int | float) or not low <= greatest <= high:
        raise RefusedError(
            f"the message must have {names.MAX_LOSS}, from {low:g} to {high:g}"
        )
    classes = evaluator.settings.num_classes if config.get(names.PER_CLASS) else None
    if config.get(names.PER_CLASS) and classes is None:
        raise RefusedError("this client does not evaluate by class")
    return number, session, Question(float(greatest), classes)


def reported(counts: Counts, num_examples: int) -> Metrics:
    """Return the metrics of a reply: noisy sums, and what is public."""
    told: Metrics = {
        names.NUM_EXAMPLES: num_examples,
        names.CORRECT: counts.correct,
        names.LOSS: counts.loss,
        names.NOISE_STD: counts.noise_std,
    }
    if counts.classes is not None:
        by_class = zip(names.CLASS_SUMS, counts.classes.tolist(), strict=True)
        told.update(by_class)
    return told
