"""The client's half of Safe-DSHB (Algorithm 1, lines 4 to 7), driven by every engine.

`training_step` is the only implementation of it: the budget is charged before any data
is read, and the momentum is kept before it is sent. It is a generator that asks for a
private gradient where one is needed; engines differ in how they compute that alone.

A server may ask for K such steps in one message. Then the node takes them with its own
model and its own momentum, all of them charged before the first, and sends the mean of
the K momentums: K gamma times it is how far the node's model has come.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeGuard, cast

import numpy as np
import torch
from flwr.app import Context
from flwr.client import NumPyClient
from numpy.typing import NDArray
from torch import nn

from flwr_safedshb.algorithm.budget import RefusedError, keep_to_budget
from flwr_safedshb.algorithm.errors import refusal
from flwr_safedshb.algorithm.model_arrays import SHARED
from flwr_safedshb.algorithm.momentum_store import Kept, keep, recall
from flwr_safedshb.algorithm.privacy_statement import statement
from flwr_safedshb.algorithm.wire import (
    LEARNING_RATE,
    LOCAL_STEPS,
    MAX_LOCAL_STEPS,
    MOMENTUM_TAG,
    REPORT_PRIVACY,
    RUN_EVALUATIONS,
    RUN_STEPS,
    Arrays,
    Template,
    sgd_step,
)
from flwr_safedshb.flower.compat import Mod, check_mods
from flwr_safedshb.privacy.accounting.ranges import MAX_STEPS
from flwr_safedshb.privacy.bad_examples import log_causes
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.datasets import Examples
from flwr_safedshb.privacy.ledger.ledger import Ledger
from flwr_safedshb.privacy.losses import Loss
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.private_gradient import (
    BLOCK,
    BatchSource,
    Vector,
    private_vector,
)
from flwr_safedshb.privacy.randomness.noise import Randomness
from flwr_safedshb.sanitize import SAFE_NAME

if TYPE_CHECKING:
    from flwr_safedshb.algorithm.answer_evaluation import Evaluator

Scalar = bool | bytes | float | int | str
# Momentum, number of examples, metrics.
Fitted = tuple[Arrays, int, dict[str, Scalar]]


@dataclass(frozen=True)
class Step:
    """What is asked: t, beta, the run, and whether the server may come back to it.

    Of several steps (K = `count`), `number` is the first, and `learning_rate` is gamma.
    The server may want to be told what the run costs (`states`).
    """

    number: int
    momentum: float
    session: str
    anchor: bool
    count: int = 1
    learning_rate: float = 0.0
    states: bool = False
    run: RunLength | None = None


@dataclass(frozen=True)
class RunLength:
    """How many steps and private evaluations a run takes at most, as its server says.

    Whatever is said, the guarantee holds: a run is only committed to it.
    """

    steps: int
    evaluations: int


@dataclass(frozen=True)
class GradientRequest:
    """A private gradient that a step needs.

    Attributes
    ----------
    client : Steps
    number : int
        Of the step, t.
    weights : list of arrays
        theta_t.
    """

    client: Steps
    number: int
    weights: Arrays

    @property
    def draw(self) -> BatchSource:
        """Whose examples the gradient is of, with the randomness of this step."""
        client = self.client
        # The partition of a simulation: node ids differ between engines.
        config, node = client.context.node_config, client.context.node_id
        place = int(config.get("partition-id", node))
        source = client.randomness.for_step(place, self.number)
        return BatchSource(client.dataset, client.plan, source)

    def load_weights(self) -> None:
        """Give the client's model the weights of the request."""
        load(self.client.trained, self.weights)


class Steps(NumPyClient):
    """What a client takes its steps with; `SafeDSHBClient` is how it comes by them."""

    model: nn.Module
    loss: Loss
    gradients: ClippedGradients
    template: Template
    trained: list[nn.Parameter]
    dataset: Examples
    plan: PrivacyPlan
    context: Context
    ledger: Ledger | None
    randomness: Randomness
    evaluator: Evaluator | None
    weight_decay: float
    max_epsilon: float | None
    delta: float | None
    trusted_mods: Collection[Mod]

    def fit(self, parameters: Arrays, config: Mapping[str, Scalar]) -> Fitted:
        """Take one step, or as many as the message asks for.

        Parameters
        ----------
        parameters : list of arrays
            theta_t, the parameters that are trained, in the order of
            ``model.parameters()``.
        config : mapping
            ``step`` (t), ``momentum`` (beta), and from `SafeDSHB` also ``session``,
            the name of the run, ``anchor``, whether it may come back to this step, and
            ``local-steps`` (K) with their ``learning-rate`` (gamma).

        Returns
        -------
        momentum, num_examples, metrics
            m_t in float32, or the mean of K of them, m, and the mark of a momentum; in
            the last round also the run's ``epsilon`` and ``delta``, if there is one.

        Raises
        ------
        RefusedError
        """
        steps = self.take_steps(parameters, config)
        try:
            request = next(steps)
            while True:
                request = advance(steps, _compute_gradient(request))
        except StopIteration as done:
            return cast(Fitted, done.value)

    def take_steps(
        self, parameters: Arrays, config: Mapping[str, Scalar]
    ) -> Generator[GradientRequest, Vector, Fitted]:
        """Take steps as `fit` does, with gradients that its driver computes.

        Raises
        ------
        RefusedError
        """
        if (reason := check_mods(self.trusted_mods)) is not None:
            raise RefusedError(reason)
        try:
            momentum, stated = yield from training_step(self, parameters, config)
        except GeneratorExit:
            raise
        except BaseException as error:
            refused = refusal(error)
        else:
            return momentum, self.plan.num_examples, {**stated, **make_momentum_tag()}
        # Outside the handler, so that no cause is attached.
        raise refused


def training_step(
    client: Steps, parameters: Arrays, config: Mapping[str, object]
) -> Generator[GradientRequest, Vector, tuple[Arrays, dict[str, float]]]:
    """Charge the budget, take K private steps, keep the momentum and return the reply.

    Yields a `GradientRequest` wherever a private gradient is needed and expects that
    gradient, (d,), in return. The order below is what the privacy guarantee rests on.

    Returns
    -------
    momentum, stated
        m_t, in the shapes of the model, or the mean of K of them; and what the run has
        cost, if that is asked.
    """
    step = step_of(client, parameters, config)
    past = charge(client, step)
    weights, momentum = parameters, past.momentum
    total: NDArray[np.floating] | None = None
    for number in range(step.number, step.number + step.count):
        # Lines 4 to 6: draw a batch, clip, average, add noise.
        gradient = yield GradientRequest(client, number, weights)
        momentum = _updated(gradient, momentum, step.momentum)  # line 7
        if step.count > 1:
            total = momentum.astype(np.float64) if total is None else total + momentum
            direction = client.template.split(momentum)
            pairs = zip(weights, direction, strict=True)
            weights = [sgd_step(*pair, step.learning_rate) for pair in pairs]
    keep(replace(step, number=number), momentum, past, client.context, client.ledger)
    reply = momentum if total is None else (total / step.count).astype(np.float32)
    return client.template.split(reply), statement(client, step) if step.states else {}


def advance(
    steps: Generator[GradientRequest, Vector, Fitted], found: Vector | BaseException
) -> GradientRequest:
    """Go on with a gradient, or with the error that there was in place of one.

    Raises
    ------
    StopIteration
        At the end, with what `fit` returns.
    RefusedError
    """
    if isinstance(found, GeneratorExit):  # which would mean that nobody waits any more
        found = RuntimeError("the gradient was given up")
    return steps.throw(found) if isinstance(found, BaseException) else steps.send(found)


def _compute_gradient(request: GradientRequest) -> Vector | BaseException:
    """Return the private gradient that is asked for, or why there is none."""
    client = request.client
    try:
        request.load_weights()
        # Only a simulation may say what is wrong with its examples.
        with log_causes(not client.randomness.private):
            return private_vector(client.gradients, request.draw, client.weight_decay)
    except BaseException as error:
        return error


def step_of(client: Steps, parameters: Arrays, config: Mapping[str, object]) -> Step:
    """Return the step that a message asks for.

    Raises
    ------
    RefusedError
        If it makes no sense, or is for another model.
    """
    number, beta = config.get("step"), config.get("momentum")
    session = config.get("session", str(client.context.run_id))
    if not _is_count(number):
        raise RefusedError(
            "the message must have step, an integer of at least 0, which the strategy "
            "SafeDSHB sends; others would take a momentum for weights"
        )
    if not isinstance(beta, float | int) or not 0.0 <= beta < 1.0:
        raise RefusedError("the message must have momentum, a number in [0, 1)")
    if not isinstance(session, str) or not SAFE_NAME.fullmatch(session):
        raise RefusedError(
            "the message's session must be up to 64 letters, digits, '.', '_', '-'"
        )
    check_shapes(client, parameters)
    anchor, states = config.get("anchor", True), config.get(REPORT_PRIVACY, False)
    more = bool(anchor), *_several(config), bool(states)
    return Step(number, float(beta), session, *more, run_length(config))


def run_length(config: Mapping[str, object]) -> RunLength | None:
    """Return how long a run is, if its message says so."""
    if RUN_STEPS not in config and RUN_EVALUATIONS not in config:
        return None
    steps, evaluations = (config.get(n, 0) for n in (RUN_STEPS, RUN_EVALUATIONS))
    if not (_is_count(steps, MAX_STEPS) and _is_count(evaluations, MAX_STEPS)):
        raise RefusedError(
            f"the message's {RUN_STEPS} and {RUN_EVALUATIONS} must be integers from 0 "
            f"to {MAX_STEPS}"
        )
    return RunLength(steps, evaluations)


def _is_count(value: object, most: int = 2**62) -> TypeGuard[int]:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and 0 <= cast(int, value) <= most


def check_shapes(client: Steps, parameters: Arrays) -> None:
    """Refuse arrays of a message that cannot be given to the model as they are."""
    shapes, own = [array.shape for array in parameters], [*client.template.shapes]
    if shapes != own:
        raise RefusedError(
            f"the message has arrays of shapes {shapes}, and the model of this client "
            f"trains {own}; use the same model on both sides, and start the run from "
            "trained_arrays(model)"
        )

    for array in parameters:
        dtype = array.dtype
        if dtype.kind not in "fiub" or not dtype.isnative or dtype.itemsize > 8:
            raise RefusedError(
                f"the message has an array of dtype {dtype}, and weights are floats of "
                "at most 64 bits"
            )


def _several(config: Mapping[str, object]) -> tuple[int, float]:
    """Return how many steps a message asks for, and at which rate; one by default."""
    count, rate = config.get(LOCAL_STEPS, 1), config.get(LEARNING_RATE, 0.0)
    whole = isinstance(count, int) and not isinstance(count, bool)
    if not whole or not 1 <= cast(int, count) <= MAX_LOCAL_STEPS:
        raise RefusedError(
            f"the message's {LOCAL_STEPS} must be an integer from 1 to "
            f"{MAX_LOCAL_STEPS}"
        )
    if count == 1:
        return 1, 0.0
    if not isinstance(rate, float | int) or not 0.0 < rate < math.inf:
        raise RefusedError(f"the message's {LEARNING_RATE} must be finite and above 0")
    return cast(int, count), float(rate)


def charge(client: Steps, step: Step) -> Kept:
    """Charge the node's ledger, and return the momentum that the step starts from.

    A crash may then waste budget, and hides nothing. A model that cannot be trained
    privately is refused first, and one whose momentum the disk has no room for; both
    cost nothing.
    """
    # Only a simulation may say what is wrong with its examples.
    with log_causes(not client.randomness.private):
        if client.dataset.like is not None:
            client.gradients.prepare(*client.dataset.like)
    past = recall(
        step.session, step.number, client.gradients.size, client.context, client.ledger
    )
    if client.ledger is not None:
        commit(client, step.session, step.run)
        client.ledger.charge(client.plan, step.count, step.session)
    else:
        last = step.number + step.count - 1
        others = client.evaluator.released(client.context) if client.evaluator else ()
        keep_to_budget(client.plan, client.max_epsilon, client.delta, last, others)
    return past


def commit(client: Steps, session: str, run: RunLength | None) -> None:
    """Commit a run before its first release, if its server says how long it is."""
    if client.ledger is None or run is None:
        return
    block = [(client.plan, run.steps)]
    if client.evaluator is not None:
        block.append((client.evaluator.plan, run.evaluations))
    client.ledger.commit(block, session)


def load(
    trained: Iterable[nn.Parameter], arrays: Iterable[NDArray[np.generic]]
) -> None:
    """Give the parameters of a model the weights that were sent."""
    for parameter, array in zip(trained, arrays, strict=True):
        held = parameter.detach()
        if held.device.type == "cpu" and held.dtype in SHARED:
            np.copyto(held.numpy(), array, casting="same_kind")
        else:
            held.copy_(torch.from_numpy(array.copy()))


def _updated(gradient: Vector, before: Vector, beta: float) -> Vector:
    """Turn a private gradient, (d,), into the momentum after it, in its place."""
    earlier = np.broadcast_to(before, gradient.shape)
    for start in range(0, len(gradient), BLOCK):
        block = slice(start, start + BLOCK)
        # Line 7: m_t = beta m_{t-1} + (1 - beta) g~_t.
        exact = np.multiply(gradient[block], 1.0 - beta, dtype=np.float64)
        exact += beta * earlier[block]
        gradient[block] = exact
    return gradient


def make_momentum_tag() -> dict[str, int]:
    """Return the mark of a momentum, with a number that nobody can guess.

    A record travels under the hash of its bytes. One that others could guess they could
    send first, with parts that are not its own.
    """
    return {MOMENTUM_TAG: secrets.randbits(62)}
