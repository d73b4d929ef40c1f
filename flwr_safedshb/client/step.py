"""One step of Algorithm 1, as one client takes it.

Every line of `take_step` is a line of the algorithm, or what makes it safe: the budget
is charged before the data are touched, and the momentum is kept before it is sent.

A server may ask for K such steps in one message. Then the node takes them with its own
model and its own momentum, all of them charged before the first, and sends the mean of
the K momentums: K gamma times it is how far the node's model has come.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np

from flwr_safedshb.client.evaluation import evaluations_so_far
from flwr_safedshb.client.momentum import Kept, keep, recall
from flwr_safedshb.client.node import RefusedError, keep_to_budget
from flwr_safedshb.exchange.arrays import (
    LEARNING_RATE,
    LOCAL_STEPS,
    MAX_LOCAL_STEPS,
    Arrays,
    stepped,
)
from flwr_safedshb.privacy.examples import causes_shown
from flwr_safedshb.privacy.gaussian import (
    BLOCK,
    Draw,
    Vector,
    prepare,
    private_vector,
)

if TYPE_CHECKING:
    from flwr_safedshb.client.client import SafeDSHBClient


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


def take_step(client: SafeDSHBClient, step: Step, parameters: Arrays) -> Arrays:
    """Take one step and return m_t, in the shapes of the model."""
    past = charge(client, step)
    if step.count > 1:
        return _take_several(client, step, past, parameters)
    return finish(client, step, past, _gradient(client, step, parameters))


def _take_several(
    client: SafeDSHBClient, step: Step, past: Kept, parameters: Arrays
) -> Arrays:
    """Take K steps that are paid for, and return the mean of their momentums."""
    weights, momentum = list(parameters), past.momentum
    total = np.zeros(client.gradients.size)
    for number in range(step.number, step.number + step.count):
        gradient = _gradient(client, replace(step, number=number), weights)
        momentum = _updated(gradient, momentum, step.momentum)
        total += momentum
        direction = client.arrays.split(momentum)
        rate = step.learning_rate
        weights = [stepped(*w, rate) for w in zip(weights, direction, strict=True)]
    last = replace(step, number=number)
    keep(last, momentum, past, client.context, client.ledger)
    return client.arrays.split((total / step.count).astype(np.float32))


def several(config: Mapping[str, object]) -> tuple[int, float]:
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


def charge(client: SafeDSHBClient, step: Step) -> Kept:
    """Charge the node's ledger, and return the momentum that the step starts from.

    A crash may then waste budget, and hides nothing. A model that cannot be trained
    privately is refused first, and one whose momentum the disk has no room for; both
    cost nothing.
    """
    # Only a simulation may say what is wrong with its examples.
    with causes_shown(not client.randomness.private):
        prepare(client.gradients, client.dataset)
    past = recall(
        step.session, step.number, client.gradients.size, client.context, client.ledger
    )
    if client.ledger is not None:
        client.ledger.charge(client.plan, step.count, step.session)
    else:
        last = step.number + step.count - 1
        others = evaluations_so_far(client)
        keep_to_budget(client.plan, client.max_epsilon, client.delta, last, others)
    return past


def _gradient(client: SafeDSHBClient, step: Step, parameters: Arrays) -> Vector:
    """Return g~_t, (d,), the private gradient at theta_t (lines 1 to 3)."""
    client.arrays.load(parameters)
    draw = draw_of(client, step)
    with causes_shown(not client.randomness.private):
        return private_vector(client.gradients, draw, client.weight_decay)


def draw_of(client: SafeDSHBClient, step: Step) -> Draw:
    """Return whose examples the gradient is of, with the randomness of this step."""
    # The partition of a simulation: node ids differ between engines.
    config, node = client.context.node_config, client.context.node_id
    number = int(config.get("partition-id", node))
    source = client.randomness.for_step(number, step.number)
    return Draw(client.dataset, client.plan, source)


def finish(client: SafeDSHBClient, step: Step, past: Kept, gradient: Vector) -> Arrays:
    """Update the momentum with a private gradient, (d,), keep it and return it.

    The momentum takes the place of the gradient: a model may be as large as it fits.
    """
    momentum = _updated(gradient, past.momentum, step.momentum)
    keep(step, momentum, past, client.context, client.ledger)
    return client.arrays.split(momentum)


def _updated(gradient: Vector, before: Vector, beta: float) -> Vector:
    """Turn a private gradient, (d,), into the momentum after it, in its place."""
    earlier = np.broadcast_to(before, gradient.shape)
    for start in range(0, len(gradient), BLOCK):
        block = slice(start, start + BLOCK)
        # Line 4: m_t = beta m_{t-1} + (1 - beta) g~_t.
        exact = np.multiply(gradient[block], 1.0 - beta, dtype=np.float64)
        exact += beta * earlier[block]
        gradient[block] = exact
    return gradient
