"""Odd plans and limits open no ledger, and the attack sees it where they do."""

import math

import pytest

from flwr_safedshb.audit.odd_plans import (
    DELTA,
    Request,
    attack_limits,
    attack_plans,
    least_epsilon,
    odd_plans,
)
from flwr_safedshb.privacy.ledger.ledger import Ledger
from flwr_safedshb.privacy.plan import PrivacyPlan, Sampling

USUAL = {"clip_norm": 1.0, "batch_size": 8, "num_examples": 8}
QUICK: list[Request] = [
    ({**USUAL, "noise_multiplier": value}, steps)
    for value, steps in (
        *((value, 1) for value in (0.0, 1e-310, 1e-160, 1e-3, math.inf, math.nan)),
        *((50.0, steps) for steps in (0, -1, True, 1.5, math.nan, "1", 10**12)),
        (50.0, 1),
    )
]


def test_the_ledger_withstands_odd_plans() -> None:
    found = attack_plans(requests=QUICK)
    assert found.broken == []
    assert found.outcomes() == {"charged": 1, "no plan": 4, "refused": 9}


class NotANumber(Ledger):
    """A divergence that overflows to nan passes for nothing."""

    def __init__(self, *limits: object) -> None:
        super().__init__(*limits)  # type: ignore[arg-type]
        self.fooled = False

    def charge(self, plan: PrivacyPlan, steps: int = 1, run: str | int = "") -> None:
        self.fooled |= 0 < plan.noise_multiplier < 1e-2
        if not self.fooled:
            super().charge(plan, steps, run)

    def epsilon(self, run: str | int | None = None) -> float:
        return 0.0 if self.fooled else super().epsilon(run)


class Unbounded(NotANumber):
    """The same, and says so."""

    def epsilon(self, run: str | int | None = None) -> float:
        return math.nan if self.fooled else super().epsilon(run)


class StaysOpen(NotANumber):
    """Reports a cost that looks right, and never refuses again."""

    def epsilon(self, run: str | int | None = None) -> float:
        return 0.5


@pytest.mark.parametrize(
    ("planted", "broken"),
    [
        (NotANumber, "epsilon is 0.0, below one step's"),
        (Unbounded, "epsilon is nan"),
        (StaysOpen, "below one step's"),
    ],
)
def test_a_divergence_that_is_no_number_is_found(
    planted: type[Ledger], broken: str
) -> None:
    (case,) = attack_plans(planted, QUICK).broken
    assert "noise_multiplier=0.001" in case.request
    assert broken in case.broken


def test_odd_budgets_and_rules_are_refused() -> None:
    found = attack_limits()
    assert [case for case in found.broken if "Fraction" not in case.request] == []
    assert min(found.outcomes().values()) >= 1


def test_what_is_asked_covers_every_number_of_a_plan() -> None:
    asked = list(odd_plans())
    assert len(asked) > 300
    for name in ("clip_norm", "noise_multiplier", "batch_size", "num_examples"):
        values = {repr(fields[name]) for fields, _ in asked}
        assert {"nan", "inf", "1e-160", "True", "-1.0"} <= values


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
@pytest.mark.parametrize("multiplier", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("examples", [25, 2763])
def test_the_least_epsilon_is_below_the_accounted(
    sampling: Sampling, multiplier: float, examples: int
) -> None:
    plan = PrivacyPlan(1.0, multiplier, 25, examples, sampling)
    assert least_epsilon(plan, DELTA) <= plan.epsilon(1, DELTA)


def test_the_least_epsilon_is_close_where_it_can_be() -> None:
    plan = PrivacyPlan(1.0, 1.0, 25, 25)
    assert least_epsilon(plan, DELTA) > 0.8 * plan.epsilon(1, DELTA)
