"""The privacy budget of a node: its owner's policy, and what a run may still spend.

`open_budget` admits a run under the node's own config, which no message can change. A
node keeps its budget in a ledger (`LedgerBudget`); a simulation may have none and
counts its own steps (`SimulatedBudget`). Both are charged before any data is read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from logging import ERROR, WARNING
from pathlib import Path
from typing import Protocol, cast

from flwr.app import ConfigRecord, Context, RecordDict, UserConfigValue
from flwr.common import log

from flwr_safedshb.algorithm.momentum_store import (
    ContextMomentums,
    MomentumFiles,
    MomentumStore,
)
from flwr_safedshb.algorithm.refusal import RefusedError
from flwr_safedshb.algorithm.requests import EvaluateRequest, RunLength, TrainRequest
from flwr_safedshb.algorithm.split import split_plans
from flwr_safedshb.algorithm.wire import DELTA, EPSILON
from flwr_safedshb.atomic_io import make_private_folder
from flwr_safedshb.privacy.accounting.ranges import MAX_STEPS
from flwr_safedshb.privacy.datasets import Examples
from flwr_safedshb.privacy.ledger.ledger import Ledger, LedgerError
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.policy import NodePolicy, get_rule_names

LEDGER_NAME = "safedshb.sqlite"
# Keys of a node's config that are no rules of its policy.
SIMULATION_KEYS = ("partition-id", "num-partitions")
NODE_KEYS = (
    *SIMULATION_KEYS,
    "state-dir",
    "approved-apps",
    "commit-steps",
    "commit-evaluations",
    "allow-plain-evaluation",
)
# The name under which the owner's own commitment stands in the ledger.
_OWNER = "owner"
_EVALUATIONS = "safedshb-evaluations"
_UNUSABLE = "the privacy ledger of this node cannot be used"

# Entries of a node's config, without those of a simulation.
Rules = tuple[tuple[str, UserConfigValue], ...]


class PrivacyBudget(Protocol):
    """What a node may still spend on a run.

    Attributes
    ----------
    plan : PrivacyPlan
        Of a training step.
    evaluation_plan : PrivacyPlan or None
        Of a private evaluation.
    protects_data : bool
        Whether the examples are somebody's: then no error may tell about them.
    store : MomentumStore
        Where the momentum is kept, which must last as long as the budget.
    """

    @property
    def plan(self) -> PrivacyPlan: ...  # noqa: D102
    @property
    def evaluation_plan(self) -> PrivacyPlan | None: ...  # noqa: D102
    @property
    def protects_data(self) -> bool: ...  # noqa: D102
    @property
    def store(self) -> MomentumStore: ...  # noqa: D102

    def charge_training(self, request: TrainRequest) -> None:
        """Charge the local steps of a request, durably, or refuse them."""
        ...

    def charge_evaluation(self, request: EvaluateRequest) -> None:
        """Charge one private evaluation, durably, or refuse it."""
        ...

    def report_cost(self, request: TrainRequest) -> dict[str, float]:
        """Return epsilon and delta of the run after a request, if they are known."""
        ...


@dataclass(frozen=True)
class RunTerms:
    """What a run asks of a node, beside its plans.

    Attributes
    ----------
    max_epsilon, delta : float, optional
        The budget that the run asks for; at most the policy's.
    secure_noise : bool
        Whether nobody can repeat the noise.
    node_keys : tuple of str
        Keys of the node's config that belong to the app.
    """

    max_epsilon: float | None = None
    delta: float | None = None
    secure_noise: bool = True
    node_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class LedgerBudget:
    """A budget in the node's ledger, on its disk."""

    ledger: Ledger
    plan: PrivacyPlan
    evaluation_plan: PrivacyPlan | None = None
    protects_data = True

    @property
    def store(self) -> MomentumStore:
        """Files beside the ledger."""
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
        """Flower's context."""
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


def open_budget(
    context: Context,
    plan: PrivacyPlan,
    evaluation_plan: PrivacyPlan | None,
    terms: RunTerms,
    held_out_of: Examples | None = None,
) -> PrivacyBudget:
    """Admit a run under the policy of a node, and open the node's budget.

    Parameters
    ----------
    context : Context
        Of the node; its config holds the owner's rules.
    plan, evaluation_plan : PrivacyPlan
        Of a step and of a private evaluation, if there are any.
    terms : RunTerms
    held_out_of : Examples, optional
        All examples of the node, if some are held out of training: each part then pays
        for its own use only, by plans that name the part.

    Raises
    ------
    RefusedError
        If the policy forbids a plan, or the privacy of the run cannot be kept.
    """
    config = context.node_config
    rules = tuple(entry for entry in config.items() if entry[0] not in SIMULATION_KEYS)
    ledger = _admit_training(rules, plan, terms)
    if evaluation_plan is not None:
        _admit_evaluation(rules, evaluation_plan, terms.node_keys)
        if ledger is not None:
            _check_unit(evaluation_plan, ledger)
        if held_out_of is not None:
            folder = None if ledger is None else ledger.path.parent
            plan, evaluation_plan = split_plans(
                plan, evaluation_plan, held_out_of, folder
            )
    if ledger is None:
        return SimulatedBudget(plan, evaluation_plan, terms, context.state)
    budget = LedgerBudget(ledger, plan, evaluation_plan)
    _commit_for_life(rules, budget)
    return budget


def allows_plain_evaluation(
    config: Mapping[str, UserConfigValue], node_keys: Collection[str] = ()
) -> bool:
    """Return whether a node lets its data be evaluated outside of its guarantee.

    Its owner may say so. A node whose config has no key of its own, as in a simulation,
    gives no guarantee; any other key could be a rule, also a misspelt one.
    """
    harmless = {*SIMULATION_KEYS, "approved-apps", *node_keys}
    return set(config) <= harmless or config.get("allow-plain-evaluation") is True


@lru_cache(maxsize=128)
def _admit_training(rules: Rules, plan: PrivacyPlan, terms: RunTerms) -> Ledger | None:
    """Admit a run whose plan and budget are no weaker than the node's policy.

    A node that keeps a ledger admits plans with noise only, and noise that nobody can
    repeat, unless its own config has ``require-secure-noise=false``. Every message of a
    run asks the same, and opening a ledger verifies all of its charges, so admissions
    are cached; refusals are not.

    Returns
    -------
    Ledger or None
        None only for a simulation, whose noise is seeded, on a node without
        ``state-dir``.
    """
    config, policy = dict(rules), _parse_policy(rules, terms.node_keys)
    try:
        policy.check(
            plan,
            max_epsilon=terms.max_epsilon,
            delta=terms.delta,
            secure_noise=terms.secure_noise,
        )
    except ValueError as violation:
        raise RefusedError(str(violation)) from None
    if "state-dir" in config:
        if plan.noise_multiplier == 0:
            raise RefusedError(
                "the run asks for noise_multiplier=0, which no privacy budget allows"
            )
        ledger = _open_ledger(str(config["state-dir"]), policy, terms)
        _check_unit(plan, ledger)
        return ledger
    if terms.secure_noise:
        raise RefusedError(
            "this node has no state-dir to keep its privacy budget in; set it in the "
            "node's config, or use SeededRandomness for a simulation"
        )
    ruled = sorted(set(config) - {"approved-apps", *terms.node_keys})
    if ruled:  # a rule about the sum of all steps needs a ledger that remembers them
        raise RefusedError(
            f"this node has the rule {ruled[0]} and no state-dir to keep a privacy "
            "budget in, and so could not enforce it; set state-dir in the node's "
            "config, or remove its rules for a simulation"
        )
    return None


@lru_cache(maxsize=128)
def _admit_evaluation(
    rules: Rules, plan: PrivacyPlan, node_keys: tuple[str, ...]
) -> None:
    """Admit private evaluations whose plan is no weaker than the node's policy.

    They touch all examples: a policy that names samplers must name theirs. Their clip
    is of numbers between 0 and 1, which no rule is about.
    """
    policy = replace(_parse_policy(rules, node_keys), max_clip_norm=None)
    try:
        policy.check(plan)
    except ValueError as violation:
        raise RefusedError(f"evaluation: {violation}") from None
    if "state-dir" in dict(rules) and plan.noise_multiplier == 0:
        raise RefusedError("evaluation without noise, which no privacy budget allows")


def _parse_policy(rules: Rules, node_keys: tuple[str, ...]) -> NodePolicy:
    """Return the policy in a node's config; a key that nobody knows is an error."""
    others = (*NODE_KEYS, *node_keys)
    if taken := sorted({*get_rule_names(), *NODE_KEYS} & {*node_keys}):
        raise RefusedError(
            f"node_keys has {taken[0]}, which is the owner's; name the app's key "
            "otherwise"
        )
    own = {key: value for key, value in rules if key not in others}
    policy = NodePolicy.from_config(own, others)
    if "state-dir" in dict(rules) and policy.require_secure_noise is None:
        policy = replace(policy, require_secure_noise=True)
    return policy


def _check_unit(plan: PrivacyPlan, ledger: Ledger) -> None:
    """Refuse a plan that has no accountant for the ledger's unit."""
    try:
        plan.convert_to_unit(ledger.unit)
    except ValueError as error:
        raise RefusedError(f"the unit of this node is {ledger.unit}: {error}") from None


def _commit_for_life(rules: Rules, budget: LedgerBudget) -> None:
    """Commit a new ledger to the counts in the owner's config, over all runs.

    They are counts of the first run's plans. A run that commits the ledger later states
    only its own cost.
    """
    config = dict(rules)
    counts = [config.get(f"commit-{what}", 0) for what in ("steps", "evaluations")]
    for what, count in zip(("steps", "evaluations"), counts, strict=True):
        whole = isinstance(count, int) and not isinstance(count, bool)
        if not whole or not 0 <= cast(int, count) <= MAX_STEPS:
            raise RefusedError(
                f"the node's commit-{what} must be an integer from 0 to {MAX_STEPS}"
            )
    if any(counts):
        plans = [p for p in (budget.plan, budget.evaluation_plan) if p is not None]
        block = [*zip(plans, cast(list[int], counts), strict=False)]
        try:
            budget.ledger.commit(block, _OWNER)
        except LedgerError as error:
            log(ERROR, "%s", error)
            raise RefusedError(_UNUSABLE) from None


def _open_ledger(state_dir: str, policy: NodePolicy, terms: RunTerms) -> Ledger:
    """Open the node's ledger; a run may ask for a smaller budget than the policy's."""
    own, asked = policy.max_epsilon, terms.max_epsilon
    delta = terms.delta if policy.delta is None else policy.delta
    if (own is None) != (policy.delta is None):
        raise RefusedError(
            "this node's config has one of max-epsilon and delta, and a budget needs "
            "both; set the other, too"
        )
    try:
        path = make_private_folder(Path(state_dir)) / LEDGER_NAME
        ledger = Ledger(path, asked if own is None else own, delta, policy.unit)
        if asked is not None and asked < ledger.max_epsilon:
            ledger = Ledger(path, asked, delta)
        return ledger
    except (LedgerError, OSError, ValueError) as error:
        log(ERROR, "%s", error)
    raise RefusedError(_UNUSABLE)


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
    return {EPSILON: epsilon, DELTA: delta} if math.isfinite(epsilon) else {}


def _skip_report(error: Exception) -> dict[str, float]:
    log(WARNING, "This node reports no epsilon: %s", error)
    return {}


def _require_plan(plan: PrivacyPlan | None) -> PrivacyPlan:
    if plan is None:
        raise RefusedError("this client does not evaluate models on its data")
    return plan
