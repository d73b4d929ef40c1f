import math
from dataclasses import fields

import pytest

from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.policy import (
    NodePolicy,
    PolicyViolation,
    Value,
    get_limits,
)

PLAN = PrivacyPlan(1.0, 2.0, batch_size=10, num_examples=1000)
POISSON = PrivacyPlan(1.0, 2.0, 10, 1000, sampling="poisson", adjacency="add-remove")

STRICT: dict[str, Value] = {
    "max-epsilon": 1.0,
    "delta": 1e-5,
    "min-noise-multiplier": 2.0,
    "max-clip-norm": 1.0,
    "max-sampling-rate": 0.01,
    "sampling": "fixed",
    "adjacency": "replace-one",
    "unit": "replace-one",
    "require-secure-noise": True,
}


def test_no_rules_refuse_nothing() -> None:
    weak = PrivacyPlan(1e9, 0.0, 10, 10)
    asked = {"max_epsilon": 1e12, "delta": 0.1, "secure_noise": False}
    NodePolicy().check(weak, **asked)  # type: ignore[arg-type]
    # Every one of these rules alone refuses it.
    for key in STRICT.keys() - {"sampling", "adjacency", "unit"}:
        rules = {key: STRICT[key]}
        if key in ("max-epsilon", "delta"):
            rules = {k: STRICT[k] for k in ("max-epsilon", "delta")}
        with pytest.raises(PolicyViolation):
            NodePolicy.from_config(rules).check(weak, **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "asked",
    [
        *[{"max_epsilon": bad} for bad in (math.inf, math.nan, 0.0, -1.0, True, "1")],
        *[{"delta": bad} for bad in (2.0, 0.11, 0.0, math.nan, 1e-13, True)],
    ],
)
def test_a_budget_without_sense_is_refused_under_any_policy(
    asked: dict[str, float],
) -> None:
    with pytest.raises(ValueError, match=next(iter(asked))):
        NodePolicy().check(PLAN, **asked)  # type: ignore[arg-type]


def test_every_rule_is_a_limit_or_one_of_four_others() -> None:
    """A limit that is a field alone would be read from a node's file, and not held."""
    others = {"sampling", "adjacency", "unit", "require-secure-noise"}
    rules = {field.name.replace("_", "-") for field in fields(NodePolicy)}
    assert rules - others == set(get_limits())


@pytest.mark.parametrize("rule", get_limits())
def test_every_limit_is_held(rule: str) -> None:
    limit = get_limits()[rule]
    number = 1e-5 if limit.read is None else float(limit.read(PLAN))
    asked = {rule.replace("-", "_"): number} if limit.read is None else {}
    NodePolicy.from_config({rule: number}).check(PLAN, **asked)  # type: ignore[arg-type]
    stricter = NodePolicy.from_config({rule: number * (2 if limit.is_least else 0.5)})
    with pytest.raises(PolicyViolation, match=rule):
        stricter.check(PLAN, **asked)  # type: ignore[arg-type]


def test_meeting_every_rule_exactly_is_enough() -> None:
    NodePolicy.from_config(STRICT).check(PLAN, max_epsilon=1.0, delta=1e-5)
    NodePolicy.from_config(STRICT).check(PLAN)


@pytest.mark.parametrize(
    ("rule", "bound", "plan", "asked"),
    [
        ("max-epsilon", 1.0, PLAN, {"max_epsilon": 1.0001}),
        ("max-epsilon", 1.0, PLAN, {"max_epsilon": math.nan}),
        ("max-epsilon", 1.0, PLAN, {"max_epsilon": math.inf}),
        ("delta", 1e-5, PLAN, {"delta": 2e-5}),
        ("min-noise-multiplier", 2.0, PrivacyPlan(1.0, 1.9, 10, 1000), {}),
        ("max-clip-norm", 1.0, PrivacyPlan(1.1, 2.0, 10, 1000), {}),
        ("max-sampling-rate", 0.01, PrivacyPlan(1.0, 2.0, 11, 1000), {}),
        ("sampling", "fixed", POISSON, {}),
        ("adjacency", "replace-one", POISSON, {}),
        ("unit", "add-remove", PLAN, {}),
        ("require-secure-noise", True, PLAN, {"secure_noise": False}),
    ],
)
def test_each_rule_alone_refuses_what_is_weaker(
    rule: str, bound: Value, plan: PrivacyPlan, asked: dict[str, float]
) -> None:
    with pytest.raises(PolicyViolation, match=rule) as caught:
        NodePolicy.from_config({rule: bound}).check(plan, **asked)  # type: ignore[arg-type]
    said = str(caught.value)
    assert f"{rule}={bound}".lower() in said
    # Only the rule that is broken is told.
    assert not [key for key in STRICT if key != rule and f"{key}=" in said]


def test_numbers_may_be_written_as_text_and_words_as_lists() -> None:
    policy = NodePolicy.from_config(
        {"max-epsilon": "2.5", "sampling": "fixed, poisson"}
    )
    assert policy.max_epsilon == 2.5
    policy.check(POISSON)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("max-epsilon", bad) for bad in ("two", "", "nan", math.nan, math.inf, 0)],
        *[("max-epsilon", bad) for bad in (True, -1.0, "inf", 1e13)],
        *[("delta", bad) for bad in (2.0, 1.0, 0.11, 0.0, 1e-13, True, "nan")],
        *[("min-noise-multiplier", bad) for bad in (-1.0, True, "inf", "1,5", 1e-7)],
        *[("max-clip-norm", bad) for bad in (1e308, 0.0, True, math.inf)],
        *[("max-sampling-rate", bad) for bad in (5.0, 1.001, 0.0, True, math.nan)],
        *[("sampling", bad) for bad in ("Fixed", "", "fixed;poisson", "fixed,", 1)],
        ("adjacency", "add/remove"),
        *[("require-secure-noise", bad) for bad in ("true", 1, "yes")],
    ],
)
def test_values_that_cannot_be_read_are_errors(key: str, value: Value) -> None:
    with pytest.raises(ValueError, match=key):
        NodePolicy.from_config({key: value})


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("max-epsillon", "max-epsilon"),
        ("max_epsilon", "max-epsilon"),
        ("min-noise-multipler", "min-noise-multiplier"),
        ("Delta", "delta"),
    ],
)
def test_misspelt_rule_is_an_error_and_not_a_missing_rule(key: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
        NodePolicy.from_config({key: 1.0}, other_keys=["partition-id"])


def test_keys_that_are_no_rules_must_be_announced() -> None:
    config: dict[str, Value] = {"partition-id": 3, "state-dir": "x", "delta": 1e-5}
    with pytest.raises(ValueError, match="partition-id"):
        NodePolicy.from_config(config)
    policy = NodePolicy.from_config(config, other_keys=["partition-id", "state-dir"])
    assert policy == NodePolicy(delta=1e-5)
