"""The privacy budget of a run on a node, charged before any data is read.

A node keeps its budget in a ledger (`LedgerBudget`); a simulation may have none and
counts its own steps (`SimulatedBudget`). `admission.open_budget` decides which.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from logging import WARNING
from typing import cast

from flwr.app import ConfigRecord, RecordDict
from flwr.common import log

from flwr_safedshb.algorithm.momentum_store import ContextMomentums, MomentumFiles
from flwr_safedshb.algorithm.refusal import RefusedError
from flwr_safedshb.algorithm.requests import EvaluateRequest, RunLength, TrainRequest
from flwr_safedshb.algorithm.wire import DELTA, EPSILON
from flwr_safedshb.privacy.ledger.ledger import Ledger
from flwr_safedshb.privacy.plan import PrivacyPlan

LEDGER_NAME = "safedshb.sqlite"
_EVALUATIONS = "safedshb-evaluations"


@dataclass(frozen=True)
class RunTerms:
    """The budget and the conditions that a run asks a node for.

    Attributes
    ----------
    max_epsilon, delta : float, optional
        The budget that the run asks for; at most the policy's.
    secure_noise : bool
        Whether the noise is cryptographically secure: nobody can reproduce it.
    node_keys : tuple of str
        Keys of the node's config that belong to the app.
    """

    max_epsilon: float | None = None
    delta: float | None = None
    secure_noise: bool = True
    node_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class LedgerBudget:
    """A budget in the node's ledger, on its disk.

    Attributes
    ----------
    ledger : Ledger
    plan : PrivacyPlan
        Of a training step.
    evaluation_plan : PrivacyPlan, optional
        Of a private evaluation.
    protects_data : bool
        True: error texts must not reveal anything about the examples.
    """

    ledger: Ledger
    plan: PrivacyPlan
    evaluation_plan: PrivacyPlan | None = None
    protects_data = True

    @property
    def store(self) -> MomentumFiles:
        """The store of the momentum: files beside the ledger."""
        return MomentumFiles(self.ledger.path.parent)

    def charge_training(self, request: TrainRequest) -> None:
        """Commit the ledger to the run, and charge the local steps."""
        self._commit(request.session, request.run)
        self.ledger.charge(self.plan, request.local_steps, request.session)

    def charge_evaluation(self, request: EvaluateRequest) -> None:
        """Commit the ledger to the run, and charge one evaluation."""
        self._commit(request.session, request.run)
        self.ledger.charge(_require_plan(self.evaluation_plan), 1, request.session)

    def report_cost(self, request: TrainRequest) -> dict[str, float]:
        """Return what the run alone was committed to and charged for."""
        try:
            epsilon = self.ledger.epsilon(request.session)
        except Exception as error:  # the step is paid for: reply without a report
            return _skip_report(error)
        return _make_report(epsilon, self.ledger.delta)

    def _commit(self, session: str, run: RunLength | None) -> None:
        """Commit the ledger before the run's first release, if its length is known."""
        if run is None:
            return
        block = [(self.plan, run.steps)]
        if self.evaluation_plan is not None:
            block.append((self.evaluation_plan, run.evaluations))
        self.ledger.commit(block, session)


@dataclass(frozen=True)
class SimulatedBudget:
    """The budget of a simulation, whose seeded noise protects nobody.

    No ledger counts the steps, so the number of a step stands for them: a simulation
    that goes back to an earlier step repeats it with the same noise.
    """

    plan: PrivacyPlan
    evaluation_plan: PrivacyPlan | None
    terms: RunTerms
    state: RecordDict
    protects_data = False

    @property
    def store(self) -> ContextMomentums:
        """The store of the momentum: Flower's context."""
        return ContextMomentums(self.state)

    def charge_training(self, request: TrainRequest) -> None:
        """Refuse steps that exceed the budget of the run."""
        count = self._count_evaluations()
        others = ((self.evaluation_plan, count),) if self.evaluation_plan else ()
        self._check(self.plan, request.last_step, others if count else ())

    def charge_evaluation(self, request: EvaluateRequest) -> None:
        """Count one evaluation, or refuse it if it exceeds the budget of the run."""
        count, steps = self._count_evaluations(), self.store.steps_taken
        others = ((self.plan, steps),) if steps else ()
        self._check(_require_plan(self.evaluation_plan), count, others)
        self.state[_EVALUATIONS] = ConfigRecord({"count": count + 1})

    def report_cost(self, request: TrainRequest) -> dict[str, float]:
        """Return the cost of as many steps as the request's number says."""
        delta = self.terms.delta
        if self.plan.noise_multiplier == 0:
            return _make_report(math.inf, 0.0 if delta is None else delta)
        if delta is None:
            return {}
        try:
            epsilon = _cached_epsilon(self.plan, request.last_step + 1, delta)
        except Exception as error:
            return _skip_report(error)
        return _make_report(epsilon, delta)

    def _count_evaluations(self) -> int:
        record = self.state.get(_EVALUATIONS)
        return cast(int, record["count"]) if isinstance(record, ConfigRecord) else 0

    def _check(
        self, plan: PrivacyPlan, step: int, others: tuple[tuple[PrivacyPlan, int], ...]
    ) -> None:
        """Refuse a step, counted from 0, that exceeds the budget beside the others."""
        max_epsilon, delta = self.terms.max_epsilon, self.terms.delta
        if max_epsilon is None:
            return
        if delta is None:
            raise RefusedError(
                f"max_epsilon={max_epsilon:g} means nothing without delta"
            )
        if step >= _count_allowed_steps(plan, max_epsilon, delta, others):
            raise RefusedError(
                f"step {step} would exceed max_epsilon={max_epsilon:g} at "
                f"delta={delta:g}; this simulation keeps to it, though its seeded "
                "noise protects nobody"
            )


# What a run is charged to. Both have the plans as they are charged, with the parts of
# held-out examples, and the store in which the momentum lasts as long as the budget.
PrivacyBudget = LedgerBudget | SimulatedBudget


@lru_cache(maxsize=128)
def _count_allowed_steps(
    plan: PrivacyPlan,
    max_epsilon: float,
    delta: float,
    others: tuple[tuple[PrivacyPlan, int], ...],
) -> int:
    # The accountants are slow to import, and a client must start without them.
    from flwr_safedshb.privacy.accounting import accountant

    return accountant.find_max_steps(others, plan, delta, max_epsilon)


@lru_cache(maxsize=128)
def _cached_epsilon(plan: PrivacyPlan, steps: int, delta: float) -> float:
    return plan.epsilon(steps, delta)


def _make_report(epsilon: float, delta: float) -> dict[str, float]:
    return {EPSILON: math.inf if math.isnan(epsilon) else epsilon, DELTA: delta}


def _skip_report(error: Exception) -> dict[str, float]:
    log(WARNING, "This node reports no epsilon: %s", error)
    return {}


def _require_plan(plan: PrivacyPlan | None) -> PrivacyPlan:
    if plan is None:
        raise RefusedError("this client does not evaluate models on its data")
    return plan
