"""What a node's own config decides: its policy, and the ledger of its budget.

No message can change either. What a node refuses, it refuses with a `RefusedError`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from logging import ERROR
from pathlib import Path
from typing import cast

from flwr.app import UserConfigValue
from flwr.common import log

from flwr_safedshb.atomic_io import make_private_folder
from flwr_safedshb.privacy.accounting.ranges import MAX_STEPS
from flwr_safedshb.privacy.ledger.ledger import Ledger, LedgerError
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.policy import NodePolicy, get_rule_names

LEDGER_NAME = "safedshb.sqlite"
# Keys that a node's config may hold beside the rules of its policy.
PLACE = ("partition-id", "num-partitions")  # of a node in a simulation
NODE_KEYS = (
    *PLACE,
    "state-dir",
    "approved-apps",
    "commit-steps",
    "commit-evaluations",
    "allow-plain-evaluation",
)
# Whose commitment the one of a node's config is.
_OWNER = "owner"

_UNUSABLE = "the privacy ledger of this node cannot be used"

# Entries of a node's config; those that say its place decide nothing here.
Rules = tuple[tuple[str, UserConfigValue], ...]


class RefusedError(RuntimeError):
    """The client does not take the step.

    Its text reaches the server: it says which rule was broken and nothing about data.
    """


@lru_cache(maxsize=128)
def admit(
    rules: Rules,
    plan: PrivacyPlan,
    max_epsilon: float | None,
    delta: float | None,
    secure_noise: bool,
    node_keys: tuple[str, ...],
) -> Ledger | None:
    """Let a run in, if its plan and its budget are no weaker than the node's policy.

    A node that keeps a ledger admits plans with noise only, and noise that nobody can
    repeat, unless its own config has ``require-secure-noise=false``. Every message of a
    run asks the same, and to open a ledger verifies all charges in it, so answers are
    remembered; refusals are not.

    Returns
    -------
    Ledger or None
        To charge before every step; None only for a simulation, whose noise is seeded,
        on a node without ``state-dir``.

    Raises
    ------
    RefusedError
    """
    config, policy = dict(rules), _policy_of(rules, node_keys)
    try:
        policy.check(
            plan, max_epsilon=max_epsilon, delta=delta, secure_noise=secure_noise
        )
    except ValueError as violation:
        raise RefusedError(str(violation)) from None
    if "state-dir" in config:
        if plan.noise_multiplier == 0:
            raise RefusedError(
                "the run asks for noise_multiplier=0, which no privacy budget allows"
            )
        ledger = _opened(str(config["state-dir"]), policy, max_epsilon, delta)
        check_unit(plan, ledger)
        return ledger
    if secure_noise:
        raise RefusedError(
            "this node has no state-dir to keep its privacy budget in; set it in the "
            "node's config, or use SeededRandomness for a simulation"
        )
    # A sum of steps is limited by what remembers them.
    ruled = sorted(set(config) - {*PLACE, "approved-apps"} - {*node_keys})
    if ruled:
        raise RefusedError(
            f"this node has the rule {ruled[0]} and no state-dir to keep a privacy "
            "budget in, and so could not enforce it; set state-dir in the node's "
            "config, or remove its rules for a simulation"
        )
    return None


def check_unit(plan: PrivacyPlan, ledger: Ledger) -> None:
    """Refuse a plan that has no accountant for the ledger's unit."""
    try:
        plan.convert_to_unit(ledger.unit)
    except ValueError as error:
        raise RefusedError(f"the unit of this node is {ledger.unit}: {error}") from None


def commit_for_life(
    rules: Rules, ledger: Ledger, plan: PrivacyPlan, evaluation: PrivacyPlan | None
) -> None:
    """Commit a new ledger to as many steps as the node's config says, over all runs.

    They are of the plans of the run that comes first. A run that commits itself later
    says only what it costs alone.

    Raises
    ------
    RefusedError
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
        plans = [plan] if evaluation is None else [plan, evaluation]
        block = [*zip(plans, cast(list[int], counts), strict=False)]
        try:
            ledger.commit(block, _OWNER)
        except LedgerError as error:
            log(ERROR, "%s", error)
            raise RefusedError(_UNUSABLE) from None


def allows_plain_evaluation(
    config: Mapping[str, UserConfigValue], node_keys: Collection[str] = ()
) -> bool:
    """Return whether a node lets its data be evaluated outside of its guarantee.

    Its owner may say so. A node whose config has nothing of its own, as in a
    simulation, gives no guarantee; any other key could be a rule, also a misspelt one.
    """
    plain = {*PLACE, "approved-apps", *node_keys}
    return set(config) <= plain or config.get("allow-plain-evaluation") is True


@lru_cache(maxsize=128)
def admit_evaluation(
    rules: Rules, plan: PrivacyPlan, node_keys: tuple[str, ...]
) -> None:
    """Let evaluations be charged, if their plan is no weaker than the node's policy.

    They touch all examples: a policy that names samplers must name theirs. Their clip
    is of numbers between 0 and 1, and no rule is about those.

    Raises
    ------
    RefusedError
    """
    policy = replace(_policy_of(rules, node_keys), max_clip_norm=None)
    try:
        policy.check(plan)
    except ValueError as violation:
        raise RefusedError(f"evaluation: {violation}") from None
    if "state-dir" in dict(rules) and plan.noise_multiplier == 0:
        raise RefusedError("evaluation without noise, which no privacy budget allows")


def _policy_of(rules: Rules, node_keys: tuple[str, ...]) -> NodePolicy:
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


def keep_to_budget(
    plan: PrivacyPlan,
    max_epsilon: float | None,
    delta: float | None,
    step: int,
    others: tuple[tuple[PrivacyPlan, int], ...] = (),
) -> None:
    """Refuse a step of a simulation without a ledger that its budget does not allow.

    Nothing remembers the steps taken, so their number is that of the step: a simulation
    that goes back to an earlier step repeats it, with the same noise. Beside it count
    `others`, plans and how often they were released.

    Raises
    ------
    RefusedError
    """
    if max_epsilon is None:
        return
    if delta is None:
        raise RefusedError(f"max_epsilon={max_epsilon:g} means nothing without delta")
    if step >= _allowed_steps(plan, max_epsilon, delta, others):
        raise RefusedError(
            f"step {step} would exceed max_epsilon={max_epsilon:g} at delta={delta:g}; "
            "this simulation keeps to it, though its seeded noise protects nobody"
        )


@lru_cache(maxsize=128)
def _allowed_steps(
    plan: PrivacyPlan,
    max_epsilon: float,
    delta: float,
    others: tuple[tuple[PrivacyPlan, int], ...],
) -> int:
    # The accountants are slow to import, and a client must start without them.
    from flwr_safedshb.privacy.accounting import accountant

    return accountant.find_max_steps(others, plan, delta, max_epsilon)


def _opened(
    state_dir: str,
    policy: NodePolicy,
    max_epsilon: float | None,
    delta: float | None,
) -> Ledger:
    """Open the node's ledger; the run may ask for a smaller budget than the policy."""
    weakest = max_epsilon if policy.max_epsilon is None else policy.max_epsilon
    delta = delta if policy.delta is None else policy.delta
    if (policy.max_epsilon is None) != (policy.delta is None):
        raise RefusedError(
            "this node's config has one of max-epsilon and delta, and a budget needs "
            "both; set the other, too"
        )
    try:
        path = make_private_folder(Path(state_dir)) / LEDGER_NAME
        ledger = Ledger(path, weakest, delta, policy.unit)
        if max_epsilon is not None and max_epsilon < ledger.max_epsilon:
            ledger = Ledger(path, max_epsilon, delta)
        return ledger
    except (LedgerError, OSError, ValueError) as error:
        log(ERROR, "%s", error)
    raise RefusedError(_UNUSABLE)
