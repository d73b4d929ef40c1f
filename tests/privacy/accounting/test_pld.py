"""Numerical errors are part of the bound, and bounds agree on what costs more."""

import functools
import math
import tracemalloc
from argparse import Namespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flwr_safedshb.privacy.accounting import pld, pld_tilting
from flwr_safedshb.privacy.accounting.accountant import bound_epsilon, compute_epsilon
from flwr_safedshb.privacy.accounting.privacy_loss import ORDERS
from flwr_safedshb.privacy.plan import PrivacyPlan
from simulations.exact_epsilon import exact_epsilon, gaussian_epsilon
from simulations.results.sweep import Function
from simulations.studies.accounting import compare, study

SHORT = {case.name: case for case in list(study.list_cases(Namespace()))[::37]}


@functools.cache
def compare_both(name: str) -> dict[str, Any]:
    return Function(compare).run([*SHORT[name].overrides, "seed=0"])["metrics"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", SHORT)
def test_never_below_the_exact_epsilon_and_hardly_above(name: str) -> None:
    found = compare_both(name)
    assert found["holds"], found
    assert found["exact"] is None or found["ratio"] < 1.001


def test_the_short_study_compares_nearly_all_of_its_settings() -> None:
    known = [compare_both(name)["exact"] is not None for name in SHORT]
    assert sum(known) >= 0.8 * len(SHORT)


def test_many_steps_at_the_least_delta() -> None:
    # Transforms that are not tilted say 7.426 here.
    plan = PrivacyPlan(1.0, 300.0, 10, 10)
    found = plan.epsilon(100_000, 1e-12)
    assert gaussian_epsilon(math.sqrt(1e5) / 300, 1e-12) == pytest.approx(7.66548)
    assert 7.66548 < found < 7.6665


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute what is asked for again anew, and remember nothing of this test."""
    plain = pld._compute_pld_epsilon.__wrapped__
    monkeypatch.setattr(pld, "_compute_pld_epsilon", plain)


@pytest.mark.usefixtures("forgetful")
def test_a_larger_error_gives_a_larger_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PrivacyPlan(1.0, 2.0, 25, 2763)
    steps = [(profile, 400) for profile in plan.sampler.dominating_pairs(plan)]
    found = []
    for rounding in (pld_tilting._ROUNDING, 1e-9, 1e-7, 1e-3):
        monkeypatch.setattr(pld_tilting, "_ROUNDING", rounding)
        found.append(pld.compute_pld_epsilon(steps, 1e-9))
    assert found == sorted(found)
    assert found[0] < found[2]
    # Hopeless errors leave the bound that needs no transform.
    assert found[-1] == pld.compute_moment_epsilon(steps, 1e-9)


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("moments", [math.nan, math.inf])
def test_what_is_not_finite_is_infinite(
    moments: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt = np.full(len(ORDERS), moments)
    monkeypatch.setattr(pld, "compute_log_moments", lambda *_: (spoilt, 0.0))
    charges = [(PrivacyPlan(1.0, 2.0, 25, 2763), 3)]
    assert compute_epsilon(charges, 1e-5) == math.inf == bound_epsilon(charges, 1e-5)


# Numbers of either end of what is accepted.
NOISES = st.floats(math.log(1e-6), math.log(1e6)).map(math.exp)
KINDS = st.sampled_from(
    [
        ("fixed", "replace-one"),
        ("poisson", "replace-one"),
        ("poisson", "add-remove"),
    ]
)
SIZES = st.tuples(st.integers(1, 10**12), st.integers(1, 10**12)).map(sorted)
STEPS = st.floats(0, 9).map(lambda power: int(10**power))
DELTAS = st.floats(-12, -1).map(lambda power: max(1e-12, 10**power))


@settings(derandomize=True, deadline=None, max_examples=25)
@given(NOISES, KINDS, SIZES, STEPS, DELTAS)
@example(1e-6, ("fixed", "replace-one"), [1, 10**12], 10**9, 1e-12)
@example(1e6, ("poisson", "add-remove"), [1, 10**12], 10**9, 0.1)
@example(1e-6, ("poisson", "replace-one"), [7, 7], 1, 1e-12)
@example(1e6, ("fixed", "replace-one"), [10**12, 10**12], 10**9, 1e-12)
def test_every_accepted_number_has_ordered_bounds(
    noise: float, kind: tuple[str, str], sizes: list[int], steps: int, delta: float
) -> None:
    batch, examples = sizes
    plan = PrivacyPlan(1.0, noise, batch, examples, *kind)  # type: ignore[arg-type]
    exact = plan.epsilon(steps, delta)
    assert 0 <= exact <= bound_epsilon([(plan, steps)], delta)
    assert exact < math.inf


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    st.floats(-1, 2).map(lambda power: 10**power),
    KINDS,
    st.integers(1, 1000),
    st.floats(0, 4).map(lambda power: int(10**power)),
    st.sampled_from([1e-5, 1e-7, 1e-12]),
    st.sampled_from(["noise", "steps", "rate", "delta", "plan"]),
)
def test_all_bounds_agree_on_which_of_two_histories_costs_more(
    noise: float, kind: tuple[str, str], batch: int, steps: int, delta: float, less: str
) -> None:
    def plan(noise: float, batch: int) -> PrivacyPlan:
        return PrivacyPlan(1.0, noise, batch, 1000, *kind)  # type: ignore[arg-type]

    history = [(plan(noise, batch), steps)]
    other, other_delta = history, delta
    if less == "noise":
        other = [(plan(noise / 1.01, batch), steps)]
    elif less == "steps":
        other = [(plan(noise, batch), steps + max(1, steps // 100))]
    elif less == "rate":
        other = [(plan(noise, min(1000, batch + 1 + batch // 50)), steps)]
    elif less == "delta":
        other_delta = max(delta / 2, 1e-12)
    else:
        other = [*history, (plan(3 * noise, batch), max(1, steps // 10))]
    for bound in (bound_epsilon, compute_epsilon):
        assert bound(history, delta) <= bound(other, other_delta) * (1 + 1e-9)


def test_plans_of_very_different_losses_are_composed_tightly() -> None:
    # One full batch with much noise, and many rare small steps: neither grid fits both.
    rare, full = PrivacyPlan(1.0, 3.0, 1, 1000), PrivacyPlan(1.0, 60.0, 10, 10)
    together = compute_epsilon([(rare, 100_000), (full, 1)], 1e-5)
    alone = compute_epsilon([(rare, 100_000)], 1e-5)
    assert alone < together < bound_epsilon([(rare, 100_000), (full, 1)], 1e-5)
    assert together < 1.05 * alone


@pytest.mark.usefixtures("forgetful")
def test_losses_of_any_two_sizes_are_composed_in_little_memory() -> None:
    # Grids that are 2^35 times as fine as each other.
    quiet = PrivacyPlan(1.0, 1e6, 8, 8, "poisson")
    loud = PrivacyPlan(1.0, 0.1, 8, 8)
    tracemalloc.start()
    found = compute_epsilon([(quiet, 1), (loud, 1)], 1e-6)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**29
    alone = compute_epsilon([(loud, 1)], 1e-6)
    assert alone <= found <= bound_epsilon([(quiet, 1), (loud, 1)], 1e-6)


def test_coarser_grids_keep_the_masses_that_they_move() -> None:
    rng, tilt = np.random.default_rng(0), 0.7
    part = pld_tilting.TiltedDistribution(
        2.0**-10, np.arange(-37, 91), rng.random(128), 1e-9
    )
    for ratio in (2, 16, 1024):
        coarse = pld_tilting.coarsen_grid(part, part.spacing * ratio, tilt)
        fine, moved = part.points * part.spacing, coarse.points * coarse.spacing
        for power in (0.0, -1.0):  # the probability under P, and under Q
            before = part.masses @ np.exp((power - tilt) * fine)
            after = coarse.masses @ np.exp((power - tilt) * moved)
            assert after == pytest.approx(before, rel=1e-12)
        assert coarse.error >= part.error * min(ratio, 90) / 2


def test_the_exact_computation_knows_the_gaussian() -> None:
    for kind in ("fixed", "poisson-replace", "poisson-remove"):
        near = exact_epsilon(kind, 4.0, 0.999999, 100, 1e-9)
        assert near == pytest.approx(exact_epsilon(kind, 4.0, 1.0, 100, 1e-9), rel=1e-5)
