"""A ledger withstands odd plans, limits and orders; planted bugs are seen."""

import math

import pytest

from flwr_safedshb.audit.ledger_requests import (
    DELTA,
    ORDERS,
    PlanRequest,
    least_epsilon,
    odd_plans,
    request_odd_limits,
    request_odd_plans,
    request_orders,
)
from flwr_safedshb.privacy.accounting import accountant
from flwr_safedshb.privacy.ledger import ledger as module
from flwr_safedshb.privacy.ledger.admission import AdmissionRule
from flwr_safedshb.privacy.ledger.history import Totals
from flwr_safedshb.privacy.ledger.ledger import Ledger
from flwr_safedshb.privacy.plan import PrivacyPlan, Sampling

USUAL = {"clip_norm": 1.0, "batch_size": 8, "num_examples": 8}
QUICK: list[PlanRequest] = [
    ({**USUAL, "noise_multiplier": value}, steps)
    for value, steps in (
        *((value, 1) for value in (0.0, 1e-310, 1e-160, 1e-3, math.inf, math.nan)),
        *((50.0, steps) for steps in (0, -1, True, 1.5, math.nan, "1", 10**12)),
        (50.0, 1),
    )
]


def test_the_ledger_withstands_odd_plans() -> None:
    found = request_odd_plans(requests=QUICK)
    assert found.broken == []
    assert found.count_results() == {"charged": 1, "no plan": 4, "refused": 9}


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
    (case,) = request_odd_plans(planted, QUICK).broken
    assert "noise_multiplier=0.001" in case.request
    assert broken in case.broken


def test_odd_budgets_and_rules_are_refused() -> None:
    found = request_odd_limits()
    assert [case for case in found.broken if "Fraction" not in case.request] == []
    assert min(found.count_results().values()) >= 1


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


def test_a_ledger_withstands_every_order() -> None:
    found = request_orders()
    assert found.broken == []
    assert found.count_results() == {"refused": len(ORDERS), "within the limit": 12}


class Composing(AdmissionRule):
    """Compose what was chosen by looking as if it had been fixed beforehand."""

    def find_max_steps(self, plan: PrivacyPlan, charged: Totals, hint: int) -> int:
        charges = [*{**charged, plan: hint}.items()]
        found = accountant.compute_epsilon(charges, self.delta, self.unit)
        return hint if found <= self.limit else 0


class Leaving(AdmissionRule):
    """Let a history leave a first block that does not pass the filter."""

    def find_max_steps(self, plan: PrivacyPlan, charged: Totals, hint: int) -> int:
        charges = [*{**charged, plan: hint}.items()]
        return hint if self._filter.epsilon(charges) <= self.limit else 0


@pytest.mark.parametrize("planted", [Composing, Leaving])
def test_a_budget_that_is_no_filter_is_found(
    planted: type[AdmissionRule], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_rule(*arguments: object) -> AdmissionRule:
        return planted(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_make_admission_rule", make_rule)
    assert request_orders(rounds=0).broken


class OwnUnit(Ledger):
    """Accounts a run in the unit that its plan names."""

    def _in_own_unit(self, plan: PrivacyPlan) -> None:
        self.unit = self._file.unit = plan.adjacency

    def charge(self, plan: PrivacyPlan, steps: int = 1, run: str | int = "") -> None:
        self._in_own_unit(plan)
        super().charge(plan, steps, run)


def test_a_ledger_whose_unit_a_run_chooses_is_found() -> None:
    broken = [case.request for case in request_orders(OwnUnit, rounds=0).broken]
    assert "a unit that a run chooses" in broken
