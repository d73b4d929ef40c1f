"""What a run has cost the examples of a node so far, as the node states it.

It follows from the plan and the number of steps, and from nothing in the data.
"""

from __future__ import annotations

import math
from functools import lru_cache
from logging import WARNING
from typing import TYPE_CHECKING

from flwr.common import log

from flwr_safedshb.algorithm.wire import DELTA, EPSILON
from flwr_safedshb.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from flwr_safedshb.algorithm.step import Step, Steps


def statement(client: Steps, step: Step) -> dict[str, float]:
    """Return epsilon and delta of this run, if they are known.

    With a ledger it is that of the run alone, by what the run was committed to and
    charged for; in a simulation without one there were as many steps as the step's
    number says. That a statement fails is no reason to
    keep back a step that is paid for.
    """
    delta = client.delta if client.ledger is None else client.ledger.delta
    if delta is None:
        return {}
    try:
        if client.ledger is None:
            epsilon = _epsilon(client.plan, step.number + step.count, delta)
        else:
            epsilon = client.ledger.epsilon(step.session)
    except Exception as error:
        log(WARNING, "This node states no epsilon: %s", error)
        return {}
    return {EPSILON: epsilon, DELTA: delta} if math.isfinite(epsilon) else {}


@lru_cache(maxsize=128)
def _epsilon(plan: PrivacyPlan, steps: int, delta: float) -> float:
    return plan.epsilon(steps, delta)
