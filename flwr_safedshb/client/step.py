"""One step of Algorithm 1, as one client takes it.

Every line of `take_step` is a line of the algorithm, or what makes it safe: the budget
is charged before the data are touched, and the momentum is kept before it is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flwr_safedshb.client.momentum import has_room, keep, recall
from flwr_safedshb.client.node import keep_to_budget
from flwr_safedshb.exchange.arrays import Arrays
from flwr_safedshb.privacy.gaussian import (
    BLOCK,
    Draw,
    Vector,
    prepare,
    private_gradients,
)
from flwr_safedshb.privacy.ledger.ledger import LedgerError

if TYPE_CHECKING:
    from flwr_safedshb.client.client import SafeDSHBClient


@dataclass(frozen=True)
class Step:
    """What is asked: t, beta, the run, and whether the server may come back to it."""

    number: int
    momentum: float
    session: str
    anchor: bool


def take_step(client: SafeDSHBClient, step: Step, parameters: Arrays) -> Arrays:
    """Take one step and return m_t, in the shapes of the model."""
    charge(client, step)
    (gradient,) = gradients([(client, step)], parameters)
    return finish(client, step, gradient)


def charge(client: SafeDSHBClient, step: Step) -> None:
    """Charge the node's ledger, so that a crash may waste budget and hides nothing.

    A model that cannot be trained privately is refused first, and one whose momentum
    the disk has no room for; both cost nothing.
    """
    prepare(client.gradients, client.dataset)
    if client.ledger is not None:
        if not has_room(client.ledger, client.gradients.size):
            raise LedgerError(
                f"the disk of {client.ledger.path} has no room for the momentum; "
                "nothing was charged, free some space"
            )
        client.ledger.charge(client.plan, run=step.session)
    else:
        keep_to_budget(client.plan, client.max_epsilon, client.delta, step.number)


def gradients(
    takers: Sequence[tuple[SafeDSHBClient, Step]], parameters: Arrays
) -> list[Vector]:
    """Return g~_t, the private gradient at theta_t (lines 1 to 3).

    A node has one client that takes a step. A simulation may have several that share a
    model and its weight decay: then they go through it together.
    """
    client, _ = takers[0]
    client.arrays.load(parameters)
    draws = []
    for taker, step in takers:
        # The partition of a simulation: node ids differ between engines.
        config, node = taker.context.node_config, taker.context.node_id
        number = int(config.get("partition-id", node))
        source = taker.randomness.for_step(number, step.number)
        draws.append(Draw(taker.dataset, taker.plan, source))
    return private_gradients(client.gradients, draws, client.weight_decay)


def finish(client: SafeDSHBClient, step: Step, gradient: Vector) -> Arrays:
    """Update the momentum with a private gradient, (d,), keep it and return it.

    The momentum takes the place of the gradient: a model may be as large as it fits.
    """
    where = client.context, client.ledger
    past = recall(step.session, step.number, len(gradient), *where)
    earlier = np.broadcast_to(past.momentum, gradient.shape)
    for start in range(0, len(gradient), BLOCK):
        block = slice(start, start + BLOCK)
        # Line 4: m_t = beta m_{t-1} + (1 - beta) g~_t.
        exact = np.multiply(gradient[block], 1.0 - step.momentum, dtype=np.float64)
        exact += step.momentum * earlier[block]
        gradient[block] = exact
    keep(step, gradient, past, *where)
    return client.arrays.split(gradient)
