"""Admit runs under the policy in a node's own config, which no message can change."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from logging import ERROR, WARNING
from pathlib import Path
from typing import cast

from flwr.app import Context, UserConfigValue
from flwr.common import log

from flwr_safedshb.algorithm.budget import (
    LEDGER_NAME,
    LedgerBudget,
    PrivacyBudget,
    RunTerms,
    SimulatedBudget,
)
from flwr_safedshb.algorithm.refusal import RefusedError
from flwr_safedshb.algorithm.split import split_plans
from flwr_safedshb.atomic_io import make_private_folder
from flwr_safedshb.privacy.accounting.ranges import MAX_STEPS
from flwr_safedshb.privacy.ledger.ledger import Ledger, LedgerError
from flwr_safedshb.privacy.owners import PrivateData
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.policy import NodePolicy, get_rule_names
from flwr_safedshb.privacy.target import check_delta_of_node

# Keys of a node's config that are not rules of its policy.
SIMULATION_KEYS = ("partition-id", "num-partitions")
NODE_KEYS = (
    *SIMULATION_KEYS,
    "state-dir",
    "approved-apps",
    "sandbox",
    "commit-steps",
    "commit-evaluations",
    "allow-plain-evaluation",
    "receipt-key",
)
# The run name of the owner's own commitment in the ledger.
_OWNER = "owner"
_UNUSABLE = "the privacy ledger of this node cannot be used"

# Entries of a node's config, without those of a simulation.
Rules = tuple[tuple[str, UserConfigValue], ...]


def open_budget(
    context: Context,
    plan: PrivacyPlan,
    evaluation_plan: PrivacyPlan | None,
    terms: RunTerms,
    held_out_of: PrivateData | None = None,
) -> PrivacyBudget:
    """Admit a run under the policy of a node, and open the node's budget.

    Parameters
    ----------
    context : Context
        The node's; its config holds the owner's rules.
    plan, evaluation_plan : PrivacyPlan
        The plans of a training step and of a private evaluation, if the run has any.
    terms : RunTerms
    held_out_of : Examples or OwnedExamples, optional
        All examples of the node, if some are held out of training. Each part is then
        charged for its own use only, by plans that name the part.

    Raises
    ------
    RefusedError
        If the policy forbids a plan, or the budget cannot be kept.
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
    """Return whether a node permits evaluation without noise, outside of its guarantee.

    The owner may permit it. A node whose config has no rules, as in a simulation, gives
    no guarantee and permits it. An unknown key counts as a rule, as it may be a
    misspelt one.
    """
    not_rules = {*SIMULATION_KEYS, "approved-apps", *node_keys}
    return set(config) <= not_rules or config.get("allow-plain-evaluation") is True


@lru_cache(maxsize=128)
def _admit_training(rules: Rules, plan: PrivacyPlan, terms: RunTerms) -> Ledger | None:
    """Admit a run whose plan and budget satisfy the node's policy; open its ledger.

    A node that keeps a ledger admits only plans with noise, and only noise that nobody
    can reproduce, unless its own config has ``require-secure-noise=false``. Admissions
    are cached, because every message of a run asks for the same one, and opening a
    ledger verifies all of its charges. Refusals are not cached.

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
    _warn_of_delta(terms.delta if policy.delta is None else policy.delta, plan)
    if "state-dir" in config:
        if plan.noise_multiplier == 0:
            raise RefusedError(
                "the run asks for noise_multiplier=0, which no privacy budget allows"
            )
        ledger = open_node_ledger(str(config["state-dir"]), policy, terms)
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
    """Admit private evaluations whose plan satisfies the node's policy.

    They use all examples, so a policy that lists samplers must list theirs, "whole".
    The rule about the clip norm is about gradients and does not apply to them.
    """
    policy = replace(_parse_policy(rules, node_keys), max_clip_norm=None)
    try:
        policy.check(plan)
    except ValueError as violation:
        raise RefusedError(f"evaluation: {violation}") from None
    if "state-dir" in dict(rules) and plan.noise_multiplier == 0:
        raise RefusedError("evaluation without noise, which no privacy budget allows")


def _warn_of_delta(delta: float | None, plan: PrivacyPlan) -> None:
    """Warn of a delta that protects no single example."""
    if delta is not None:
        try:
            check_delta_of_node(delta, plan.num_examples)
        except ValueError as error:
            log(WARNING, "THIS DELTA PROTECTS NOBODY: %s", error)


def _parse_policy(rules: Rules, node_keys: tuple[str, ...]) -> NodePolicy:
    """Return the policy in a node's config; an unknown key is an error."""
    others = (*NODE_KEYS, *node_keys)
    if taken := sorted({*get_rule_names(), *NODE_KEYS} & {*node_keys}):
        raise RefusedError(
            f"node_keys has {taken[0]}, which is a key of the owner's policy; choose "
            "another name for the app's key"
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

    They count uses of the first run's plans. A run that commits the ledger later states
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


def open_node_ledger(state_dir: str, policy: NodePolicy, terms: RunTerms) -> Ledger:
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
