"""What a run commits to before its first release, and how that is charged."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from flwr_safedshb.privacy.accounting import accountant
from flwr_safedshb.privacy.accounting.renyi_filter import RenyiFilter
from flwr_safedshb.privacy.ledger.ledger import (
    BudgetExhausted,
    Ledger,
    LedgerError,
)
from flwr_safedshb.privacy.plan import Adjacency, PrivacyPlan

DELTA = 1e-4
PAPER = PrivacyPlan(1.0, 1.0, 25, 2763)
EVALUATE = PrivacyPlan(1.0, 20.0, 2763, 2763, sampling="whole")
OTHER = PrivacyPlan(1.0, 2.0, 25, 2763)
UNIT: Adjacency = "replace-one"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.mark.parametrize(
    ("noise", "epsilon"), [(1.0, 1.0143), (2.0, 0.3186), (3.0, 0.1836)]
)
def test_a_committed_run_costs_its_privacy_loss_distribution(
    path: Path, noise: float, epsilon: float
) -> None:
    plan = replace(PAPER, noise_multiplier=noise)
    ledger = Ledger(path, 1.02 * epsilon, DELTA)
    ledger.commit([(plan, 400)], "run")
    for _ in range(4):
        ledger.charge(plan, 100, "run")
    assert ledger.epsilon() == ledger.epsilon("run") == plan.epsilon(400, DELTA)
    assert ledger.epsilon() == pytest.approx(epsilon, abs=5e-5)


def test_a_run_pays_for_its_evaluations_in_any_order(path: Path) -> None:
    limit = accountant.compute_epsilon([(PAPER, 30), (EVALUATE, 3)], DELTA) * (1 + 1e-6)
    ledger = Ledger(path, limit, DELTA)
    ledger.commit([(PAPER, 30), (EVALUATE, 3)], "run")
    for plan in (EVALUATE, PAPER, EVALUATE):
        ledger.charge(plan, run="run")
        assert ledger.epsilon() <= limit
    ledger.charge(PAPER, 29, "run")
    ledger.charge(EVALUATE, run="run")
    assert ledger.epsilon() <= limit
    for plan in (PAPER, EVALUATE, replace(EVALUATE, noise_multiplier=1e6)):
        with pytest.raises(BudgetExhausted):
            ledger.charge(plan, run="run")


def test_a_plan_for_life_is_drawn_on_by_many_runs(path: Path) -> None:
    ledger = Ledger(path, PAPER.epsilon(4000, DELTA) * (1 + 1e-6), DELTA)
    ledger.commit([(PAPER, 4000)], "first")
    for run in range(10):
        # The clip is no part of the cost.
        ledger.charge(replace(PAPER, clip_norm=0.1 + run), 400, run)
    assert ledger.epsilon() == PAPER.epsilon(4000, DELTA)
    with pytest.raises(BudgetExhausted):
        ledger.charge(PAPER)


def test_a_run_that_stops_early_has_spent_what_it_committed_to(path: Path) -> None:
    ledger = Ledger(path, 1.02, DELTA)
    ledger.commit([(PAPER, 400)], "run")
    ledger.charge(PAPER, 1, "run")
    assert ledger.epsilon() == PAPER.epsilon(400, DELTA)
    assert ledger.steps_left(PAPER) == 399
    # It fills the budget, by the filter even more: nothing may leave it.
    assert ledger.steps_left(OTHER) == 0
    with pytest.raises(BudgetExhausted):
        ledger.charge(OTHER, 1, "another")


def test_past_a_commitment_with_room_only_what_was_used_counts(path: Path) -> None:
    ledger = Ledger(path, 4.0, DELTA)
    ledger.commit([(PAPER, 400)], "run")
    ledger.charge(PAPER, 10, "run")
    assert ledger.epsilon() == PAPER.epsilon(400, DELTA)
    ledger.charge(OTHER, 10, "another")
    used = [(PAPER, 10), (OTHER, 10)]
    renyi = RenyiFilter(((PAPER, 400),), DELTA, 4.0, UNIT)
    assert ledger.epsilon() == renyi.epsilon(used)
    assert ledger.statement().accountant == "Renyi filter"
    assert ledger.steps_left(PAPER) > 390


def test_a_block_that_fits_by_its_privacy_loss_alone_is_never_left(path: Path) -> None:
    """Delta would be spent twice: by paths to its end, and by those that leave it."""
    limit = PAPER.epsilon(400, DELTA) * 1.05
    assert (
        RenyiFilter(((PAPER, 400),), DELTA, limit, UNIT).epsilon([(PAPER, 400)]) > limit
    )
    ledger = Ledger(path, limit, DELTA)
    ledger.commit([(PAPER, 400)], "run")
    with pytest.raises(BudgetExhausted):
        ledger.charge(replace(OTHER, noise_multiplier=1e6))
    for one in (ledger, Ledger(path, limit / 2)):
        assert one.steps_left(OTHER) == 0
    ledger.charge(PAPER, 400)


def test_a_stricter_process_stays_within_its_own_limit(path: Path) -> None:
    Ledger(path, 4.0, DELTA).commit([(PAPER, 400)], "run")
    with pytest.raises(BudgetExhausted):
        Ledger(path, 0.8).charge(PAPER)
    enough = Ledger(path, 1.2)
    enough.charge(PAPER, 400)
    # What leaves the commitment needs room for all of it, by the filter.
    with pytest.raises(BudgetExhausted):
        enough.charge(OTHER)
    Ledger(path).charge(OTHER)


def test_a_commitment_larger_than_the_budget_is_cut(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(path, 0.6, DELTA)
    ledger.commit([(PAPER, 4000), (EVALUATE, 40)], "run")
    found = {c.plan: c.steps for c in ledger.commitments()}
    assert found[EVALUATE] == found[PAPER] // 100 > 0
    more = [(PAPER, found[PAPER] + 1), (EVALUATE, 40 * (found[PAPER] + 1) // 4000)]
    assert ledger.epsilon() <= 0.6 < accountant.compute_epsilon(more, DELTA)
    assert "asks for up to 4000 and 40 steps" in caplog.text


def test_a_run_is_committed_once_also_over_a_crash(path: Path) -> None:
    Ledger(path, 2.0, DELTA).commit([(PAPER, 400), (EVALUATE, 0)], "run")
    again = Ledger(path)
    again.commit([(PAPER, 400)], "run")
    again.commit([(PAPER, 9), (EVALUATE, 9)], "run")
    assert [(c.run, c.plan, c.steps) for c in again.commitments()] == [
        ("run", PAPER, 400)
    ]
    again.commit([(OTHER, 100)], "second")  # told, and no part of the first block
    assert again.epsilon() == PAPER.epsilon(400, DELTA)
    again.charge(OTHER, 100, "second")
    assert again.epsilon("second") == OTHER.epsilon(100, DELTA) < again.epsilon()


def test_a_commitment_after_a_release_is_not_the_first_block(path: Path) -> None:
    ledger = Ledger(path, 4.0, DELTA)
    ledger.charge(OTHER, 1, "run")
    ledger.commit([(PAPER, 400)], "run")
    ledger.commit([(PAPER, 400)], "another")
    ledger.charge(PAPER, 400, "another")
    renyi = RenyiFilter(((OTHER, 1),), DELTA, 4.0, UNIT)
    assert ledger.epsilon() == renyi.epsilon([(OTHER, 1), (PAPER, 400)])


@pytest.mark.parametrize("steps", [-1, 1.5, True, "4", math.nan])
def test_odd_commitments_are_refused(path: Path, steps: int) -> None:
    ledger = Ledger(path, 1.0, DELTA)
    with pytest.raises(ValueError, match="steps="):
        ledger.commit([(PAPER, steps)], "run")
    with pytest.raises(ValueError, match="run="):
        ledger.commit([(PAPER, 1)], "a b")
    assert ledger.commitments() == []


def test_a_commitment_without_noise_leaves_no_step(path: Path) -> None:
    ledger = Ledger(path, 1.0, DELTA)
    ledger.commit([(replace(PAPER, noise_multiplier=0.0), 10)], "run")
    assert ledger.commitments() == []
    ledger.charge(PAPER)


# The unit


ADDED = replace(PAPER, sampling="poisson", adjacency="add-remove")


def test_a_run_does_not_choose_the_unit(path: Path) -> None:
    ledger = Ledger(path, 0.6, DELTA)
    assert ledger.unit == "replace-one"
    ledger.commit([(ADDED, 400)], "run")
    assert ledger.epsilon() == pytest.approx(0.5406, abs=1e-4)
    assert ledger.statement().adjacency == "replace-one"
    with (
        Ledger(path.with_name("b"), 0.3, DELTA) as small,
        pytest.raises(BudgetExhausted),
    ):
        small.charge(ADDED, 400)


def test_a_ledger_may_be_made_for_another_unit(path: Path) -> None:
    ledger = Ledger(path, 0.3, DELTA, unit="add-remove")
    ledger.charge(replace(ADDED, adjacency="replace-one"), 400)
    assert ledger.epsilon() == pytest.approx(0.2764, abs=1e-4)
    with pytest.raises(ValueError, match="adjacency='add-remove' has no accountant"):
        ledger.charge(PAPER)
    assert Ledger(path).unit == "add-remove"
    with pytest.raises(LedgerError, match="unit='replace-one' is not the one"):
        Ledger(path, unit="replace-one")
    with pytest.raises(ValueError, match="unit='patient' is unknown"):
        Ledger(path.with_name("b"), 1.0, DELTA, unit="patient")  # type: ignore[arg-type]
