"""Whatever numbers a run asks for, a ledger stays within its budget."""

import json
import math
import sqlite3
import tempfile
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flwr_safedshb.privacy.accounting import accountant, pld
from flwr_safedshb.privacy.ledger import ledger_file
from flwr_safedshb.privacy.ledger.ledger import (
    BudgetExhausted,
    Ledger,
    LedgerCorrupted,
    LedgerError,
)
from flwr_safedshb.privacy.plan import PrivacyPlan

BUDGET, DELTA = 0.5, 1e-6
USUAL = PrivacyPlan(1.0, 2.0, 25, 2763)

# Any float at all, and those of plans that somebody could mean.
FLOATS = st.floats() | st.floats(-3, 3).map(lambda power: 10.0**power)
COUNTS = st.integers() | st.integers(1, 10**4)
KINDS = st.sampled_from(
    [("fixed", "replace-one"), ("poisson", "replace-one"), ("poisson", "add-remove")]
)
PLANS = st.tuples(FLOATS, FLOATS, COUNTS, COUNTS, KINDS)
CHARGES = st.tuples(PLANS, COUNTS)
EVENTS = st.sampled_from(["reopen", "other handle", "stricter"]) | CHARGES
TINY = ((1.0, 1e-6, 25, 2763, ("fixed", "replace-one")), 1)
LARGE = ((1.0, 1e6, 1, 10**12, ("poisson", "replace-one")), 10**9)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.lists(EVENTS, max_size=6))
@example([TINY, LARGE, "reopen", TINY])
@example([LARGE, LARGE, "other handle", LARGE])
def test_any_charges_leave_a_finite_epsilon_within_the_budget(
    events: list[object],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        ledger, others = Ledger(path, BUDGET, DELTA), []
        accepted: list[tuple[PrivacyPlan, int]] = []
        # Every charge is earlier than the one before.
        times = iter(f"20{99 - i:02}-01-01T00:00:00.000+00:00" for i in range(99))
        with mock.patch.object(ledger_file, "get_time", side_effect=times):
            for event in events:
                if event == "reopen":
                    ledger.close()
                    ledger = Ledger(path)
                elif event == "stricter":
                    ledger = Ledger(path, BUDGET / 2, DELTA)
                elif event == "other handle":
                    others.append(ledger)
                    ledger = Ledger(path)
                elif isinstance(event, tuple):
                    accepted += charged(ledger, *event)
        spent = Ledger(path).epsilon()
        assert 0.0 <= spent <= BUDGET
        # What is chosen charge by charge costs more than what is fixed beforehand.
        assert spent >= accountant.compute_epsilon(accepted, DELTA, "replace-one")
        listed = [(charge.plan, charge.steps) for charge in ledger.charges()]
        assert listed == accepted
        for one in [ledger, *others]:
            with pytest.raises(BudgetExhausted):
                one.charge(PrivacyPlan(1.0, 0.1, 8, 8))
            one.close()


def charged(
    ledger: Ledger, fields: tuple[object, ...], steps: int
) -> list[tuple[PrivacyPlan, int]]:
    """Charge, and return what was accepted."""
    clip, noise, batch, examples, kind = fields
    try:
        plan = PrivacyPlan(clip, noise, batch, examples, *kind)  # type: ignore[arg-type,misc]
        ledger.charge(plan, steps)
    except (ValueError, BudgetExhausted):
        return []
    return [(plan, steps)]


@pytest.mark.parametrize("kind", ["fixed", "poisson"])
@pytest.mark.parametrize(("batch", "examples"), [(25, 2763), (8, 8), (1, 10**12)])
@pytest.mark.parametrize("noise", [1e-6, 0.0, 0.01])
def test_hardly_any_noise_is_refused_for_the_budget(
    tmp_path: Path, kind: str, batch: int, examples: int, noise: float
) -> None:
    ledger = Ledger(tmp_path / "l.sqlite", BUDGET, 1e-12)
    plan = PrivacyPlan(1.0, noise, batch, examples, kind)
    with pytest.raises(BudgetExhausted):
        ledger.charge(plan, 10**6)


HUGE = [pytest.param(10**5000, id="huge")]
ODD_BUDGETS = [True, "1", None, 1j, Decimal(1), math.nan, math.inf, -1.0, 0.0, 10**400]


@pytest.mark.parametrize("odd", [*ODD_BUDGETS, Fraction(10**400, 3), [1.0], b"1"])
def test_a_budget_without_sense_makes_no_ledger(tmp_path: Path, odd: object) -> None:
    path = tmp_path / "l.sqlite"
    for limits in ((odd, DELTA), (BUDGET, odd)):
        with pytest.raises((ValueError, LedgerError), match=r"max_epsilon|delta"):
            Ledger(path, *limits)
        assert not path.exists()


@pytest.mark.parametrize("delta", [1e-13, 0.11, 1.0, 2.0])
def test_a_delta_out_of_range_makes_no_ledger(tmp_path: Path, delta: float) -> None:
    with pytest.raises(ValueError, match="delta="):
        Ledger(tmp_path / "l.sqlite", BUDGET, delta)
    assert not (tmp_path / "l.sqlite").exists()


@pytest.mark.parametrize(
    "budget", [Fraction(1, 3), np.float32(0.3), np.float64(0.3), np.int64(1), 1]
)
def test_numbers_of_other_types_are_the_same_budget(
    tmp_path: Path, budget: float
) -> None:
    path = tmp_path / "l.sqlite"
    with Ledger(path, budget, np.float64(DELTA)) as ledger:
        assert type(ledger.max_epsilon) is float
        ledger.charge(USUAL, np.int64(3))  # type: ignore[arg-type]
    with Ledger(path, budget, Fraction(DELTA)) as again:  # type: ignore[arg-type]
        assert again.max_epsilon == float(budget)
        assert again.epsilon() == USUAL.epsilon(3, DELTA)


@pytest.mark.parametrize("odd", [*ODD_BUDGETS[:6], math.inf, -1.0, 10**400, "fixed"])
@pytest.mark.parametrize(
    "field", ["clip_norm", "noise_multiplier", "batch_size", "num_examples", "sampling"]
)
def test_a_plan_with_an_odd_number_is_refused(field: str, odd: object) -> None:
    if (field, odd) == ("sampling", "fixed"):
        return
    with pytest.raises(ValueError, match=field):
        PrivacyPlan.from_dict({**USUAL.to_dict(), field: odd})


@pytest.mark.parametrize("odd", [True, 1.0, "1", None, 1j, 0, -1, 10**10, *HUGE])
def test_steps_that_are_no_count_are_refused(tmp_path: Path, odd: int) -> None:
    ledger = Ledger(tmp_path / "l.sqlite", BUDGET, DELTA)
    with pytest.raises(ValueError, match="steps="):
        ledger.charge(USUAL, odd)
    assert ledger.charges() == []


def forge(path: Path, *, max_epsilon: float = BUDGET, **fields: object) -> None:
    """Write a ledger with one charge, as a program without ranges would do."""
    with Ledger(path, BUDGET, DELTA) as ledger:
        ledger.charge(USUAL)
        (charge,) = ledger.charges()
    text = json.dumps({**USUAL.to_dict(), **fields}, sort_keys=True)
    head = ledger_file.hash_limits(max_epsilon, DELTA, "replace-one")
    digest = ledger_file.hash_entry(head, [1, charge.time, "", "charge", text, 1])
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TRIGGER entries_keep")
        connection.execute("UPDATE plans SET plan = ?", (text,))
        connection.execute("UPDATE entries SET hash = ?", (digest,))
        connection.execute(
            "UPDATE ledger SET head = ?, max_epsilon = ?", (digest, max_epsilon)
        )


def test_a_ledger_that_another_program_wrote_is_read(tmp_path: Path) -> None:
    forge(tmp_path / "l.sqlite")
    assert Ledger(tmp_path / "l.sqlite").epsilon() == USUAL.epsilon(1, DELTA)


@pytest.mark.parametrize(
    "fields",
    [{"noise_multiplier": 1e-160}, {"sampling": "gone"}, {"clip_norm": 1e308}],
)
def test_a_charge_that_cannot_be_accounted_for_ends_the_ledger(
    tmp_path: Path, fields: dict[str, object]
) -> None:
    forge(tmp_path / "l.sqlite", **fields)  # type: ignore[arg-type]
    with pytest.raises(
        LedgerError, match=f"number 1, .*{next(iter(fields))}="
    ) as found:
        Ledger(tmp_path / "l.sqlite")
    assert type(found.value) is LedgerError


@pytest.mark.parametrize("max_epsilon", [math.inf, 1e13, -1.0])
def test_a_ledger_whose_limit_protects_nothing_is_refused(
    tmp_path: Path, max_epsilon: float
) -> None:
    path = tmp_path / "l.sqlite"
    forge(path, max_epsilon=max_epsilon)
    for stricter in (None, BUDGET):
        with pytest.raises(LedgerCorrupted, match="its limits are damaged"):
            Ledger(path, stricter)


def test_many_plans_and_many_charges_stay_cheap(tmp_path: Path) -> None:
    # Plans are read once, and no more than a few distributions are composed.
    ledger = Ledger(tmp_path / "l.sqlite", BUDGET, DELTA)
    for i in range(20):
        ledger.charge(PrivacyPlan(1.0, 50.0 + i, 25, 2763))
    with mock.patch.object(pld, "discretize_step", side_effect=AssertionError):
        ledger.charge(PrivacyPlan(1.0, 70.0, 25, 2763))
        assert 0.0 < ledger.epsilon() <= BUDGET
