"""No order of charges costs more than a limit, and the attack sees where one does."""

import pytest

from flwr_safedshb.audit.orders import ORDERS, attack_orders
from flwr_safedshb.privacy.accounting import accountant
from flwr_safedshb.privacy.ledger import ledger as module
from flwr_safedshb.privacy.ledger.admission import AdmissionRule
from flwr_safedshb.privacy.ledger.history import Totals
from flwr_safedshb.privacy.ledger.ledger import Ledger
from flwr_safedshb.privacy.plan import PrivacyPlan


def test_a_ledger_withstands_every_order() -> None:
    found = attack_orders()
    assert found.broken == []
    assert found.outcomes() == {"refused": len(ORDERS), "within the limit": 12}


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
    assert attack_orders(rounds=0).broken


class OwnUnit(Ledger):
    """Accounts a run in the unit that its plan names."""

    def _in_own_unit(self, plan: PrivacyPlan) -> None:
        self.unit = self._file.unit = plan.adjacency

    def charge(self, plan: PrivacyPlan, steps: int = 1, run: str | int = "") -> None:
        self._in_own_unit(plan)
        super().charge(plan, steps, run)


def test_a_ledger_whose_unit_a_run_chooses_is_found() -> None:
    broken = [case.request for case in attack_orders(OwnUnit, rounds=0).broken]
    assert "a unit that a run chooses" in broken
