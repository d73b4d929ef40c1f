"""Examples that are set aside: who pays for what, and what ledgers remember."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from flwr_safedshb.privacy.accounting.accountant import (
    Charges,
    bound_epsilon,
    compute_epsilon,
    find_max_steps,
    state_epsilon,
)
from flwr_safedshb.privacy.ledger.ledger import BudgetExhausted, Ledger
from flwr_safedshb.privacy.plan import PrivacyPlan

DELTA = 1e-5
TRAIN = PrivacyPlan(1.0, 1.0, 25, 500)
EVALUATE = PrivacyPlan(1.0, 20.0, 100, 100, sampling="whole")
DIGEST, OTHER = "0123456789abcdef", "f" * 16


def trained(digest: str = DIGEST) -> PrivacyPlan:
    return replace(TRAIN, part=f"trained:{digest}")


def held_out(digest: str = DIGEST) -> PrivacyPlan:
    return replace(EVALUATE, part=f"held-out:{digest}")


def gaussian(mu: float) -> float:
    """Epsilon of the Gaussian mechanism, by Balle and Wang's formula."""

    def delta(eps: float) -> float:
        low = norm.cdf(mu / 2 - eps / mu)
        return float(low - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu))

    return float(brentq(lambda eps: delta(eps) - DELTA, 0.0, 200.0))


@pytest.mark.parametrize("count", [1, 10, 400])
def test_evaluations_are_the_gaussian_mechanism(count: int) -> None:
    exact = gaussian(math.sqrt(count) / 20.0)
    found = EVALUATE.epsilon(count, DELTA)
    assert exact <= found <= 1.001 * exact


def test_two_kinds_of_evaluations_compose_as_gaussians_do() -> None:
    other = replace(EVALUATE, noise_multiplier=7.0)
    exact = gaussian(math.sqrt(30 / 400 + 5 / 49))
    found = compute_epsilon([(EVALUATE, 30), (other, 5)], DELTA)
    assert exact <= found <= 1.001 * exact


@pytest.mark.parametrize("bound", [compute_epsilon, bound_epsilon])
def test_the_parts_of_a_split_cost_the_larger(
    bound: Callable[[Charges, float], float],
) -> None:
    one, two = bound([(TRAIN, 100)], DELTA), bound([(EVALUATE, 30)], DELTA)
    both = bound([(trained(), 100), (held_out(), 30)], DELTA)
    assert both == max(one, two)
    assert bound([(TRAIN, 100), (EVALUATE, 30)], DELTA) > both


def test_what_is_for_all_examples_is_paid_by_both_parts() -> None:
    charges = [(trained(), 100), (held_out(), 30), (TRAIN, 50)]
    expected = max(
        compute_epsilon([(TRAIN, 150)], DELTA),
        compute_epsilon([(EVALUATE, 30), (TRAIN, 50)], DELTA),
    )
    assert compute_epsilon(charges, DELTA) == expected


def test_two_splits_of_the_same_data_cost_the_sum() -> None:
    """What is held out in one run may train in another."""
    charges = [(trained(), 100), (held_out(OTHER), 30)]
    assert compute_epsilon(charges, DELTA) == compute_epsilon(
        [(TRAIN, 100), (EVALUATE, 30)], DELTA
    )
    # A split that is only asked about is none.
    past = [(trained(), 100), (held_out(), 30)]
    assert compute_epsilon([*past, (held_out(OTHER), 0)], DELTA) == compute_epsilon(
        past, DELTA
    )


def test_units_are_joined_before_the_parts_are_split() -> None:
    """A step without a replace-one evaluation beside it costs its replace-one epsilon.

    By dp_accounting: 0.5406 replace-one and 0.2764 add-remove.
    """
    added = PrivacyPlan(1.0, 1.0, 25, 2763, "poisson", "add-remove")
    part = replace(added, part=f"trained:{DIGEST}")
    charges = [(part, 400), (held_out(), 1)]
    for bound in (compute_epsilon, bound_epsilon):
        joined = bound([(replace(added, adjacency="replace-one"), 400)], 1e-4)
        assert bound(charges, 1e-4) == bound([(added, 400)], 1e-4, "replace-one")
        assert bound(charges, 1e-4) == joined
    assert compute_epsilon(charges, 1e-4) == pytest.approx(0.5406, abs=1e-4)
    assert compute_epsilon([(added, 400)], 1e-4) == pytest.approx(0.2764, abs=1e-4)
    assert state_epsilon(charges, 1e-4).adjacency == "replace-one"


def test_a_unit_that_a_sampler_has_no_accountant_for_is_refused() -> None:
    with pytest.raises(ValueError, match="adjacency='add-remove' has no accountant"):
        compute_epsilon([(TRAIN, 1)], DELTA, "add-remove")


def test_steps_that_fit_are_counted_for_the_part() -> None:
    limit = TRAIN.epsilon(100, DELTA)
    past = [(held_out(), 30)]
    assert find_max_steps(past, trained(), DELTA, limit) == 100
    assert find_max_steps([(EVALUATE, 30)], TRAIN, DELTA, limit) < 100


def test_a_ledger_remembers_the_split_over_runs(tmp_path: Path) -> None:
    path, limit = tmp_path / "ledger", TRAIN.epsilon(100, DELTA) * 1.0001
    with Ledger(path, limit, DELTA) as ledger:
        ledger.commit([(trained(), 100), (held_out(), 30)], "one")
        ledger.charge(trained(), 60, "one")
        ledger.charge(held_out(), 5, "one")
    with Ledger(path) as ledger:
        ledger.charge(trained(), 40, "two")
        assert ledger.epsilon() <= limit
        # Another split, and the sum is due: it does not fit any more.
        with pytest.raises(BudgetExhausted):
            ledger.charge(held_out(OTHER), 1, "three")
        with pytest.raises(BudgetExhausted):
            ledger.charge(EVALUATE, 1, "three")
        ledger.charge(held_out(), 1, "three")
        assert [c.plan.part for c in ledger.charges()][-1] == f"held-out:{DIGEST}"


def test_plans_of_all_examples_are_written_as_before() -> None:
    assert "part" not in TRAIN.to_json()
    assert PrivacyPlan.from_json(TRAIN.to_json()) == TRAIN
    assert PrivacyPlan.from_json(trained().to_json()) == trained()


@pytest.mark.parametrize(
    "part", ["", "held-out", "trained:xyz", f"tested:{DIGEST}", f"all:{DIGEST}", 3]
)
def test_other_words_for_a_part_are_refused(part: str) -> None:
    with pytest.raises(ValueError, match="part="):
        replace(TRAIN, part=part)


def test_noise_is_found_beside_evaluations() -> None:
    beside = [(EVALUATE, 20)]
    plan = PrivacyPlan.calibrate(
        2.0, DELTA, 400, clip_norm=1.0, batch_size=25, num_examples=500, beside=beside
    )
    assert 1.98 <= compute_epsilon([(plan, 400), *beside], DELTA) <= 2.0
    with pytest.raises(ValueError, match="is spent by the other releases"):
        PrivacyPlan.calibrate(
            1.0, DELTA, 400, clip_norm=1.0, batch_size=25, num_examples=500,
            beside=[(replace(EVALUATE, noise_multiplier=1.0), 20)],
        )  # fmt: skip


def test_a_batch_that_is_not_all_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size=25 must be num_examples=500"):
        PrivacyPlan(1.0, 1.0, 25, 500, sampling="whole")
