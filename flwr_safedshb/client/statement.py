"""What a run has cost the examples of a node so far, as the node states it.

It follows from the plan and the number of steps, and from nothing in the data.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from logging import WARNING
from typing import TYPE_CHECKING

from flwr.common import log

from flwr_safedshb.exchange.arrays import DELTA, EPSILON
from flwr_safedshb.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from flwr_safedshb.client.step import Step, Steps


def statement(client: Steps, step: Step) -> dict[str, float]:
    """Return epsilon and delta of this run, if they are known.

    With a ledger the steps are those it was charged for; in a simulation without one
    they are as many as the step's number says. That a statement fails is no reason to
    keep back a step that is paid for.
    """
    delta = client.delta if client.ledger is None else client.ledger.delta
    if delta is None:
        return {}
    steps: Counter[PrivacyPlan] = Counter()
    try:
        if client.ledger is None:
            steps[client.plan] = step.number + step.count
        else:
            for charge in client.ledger.charges():
                if charge.run == step.session:
                    steps[charge.plan] += charge.steps
        epsilon = _epsilon(tuple(steps.items()), delta)
    except Exception as error:
        log(WARNING, "This node states no epsilon: %s", error)
        return {}
    return {EPSILON: epsilon, DELTA: delta} if math.isfinite(epsilon) else {}


@lru_cache(maxsize=128)
def _epsilon(charges: tuple[tuple[PrivacyPlan, int], ...], delta: float) -> float:
    # The accountants are slow to import, and a client must start without them.
    from flwr_safedshb.privacy.accounting import accountant

    return accountant.epsilon(charges, delta)
