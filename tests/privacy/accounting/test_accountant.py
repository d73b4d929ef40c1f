"""Epsilon is that of the mechanism: definitions, golden figures, composition."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm

from flwr_safedshb.privacy.accounting import accountant
from flwr_safedshb.privacy.accounting.accountant import (
    bound_epsilon,
    compute_epsilon,
    find_max_steps,
)
from flwr_safedshb.privacy.accounting.privacy_loss import (
    LossDistribution,
    discretize_step,
)
from flwr_safedshb.privacy.accounting.ranges import MAX_STEPS
from flwr_safedshb.privacy.plan import Adjacency, PrivacyPlan, Sampling

DELTA = 1e-4
KINDS: list[tuple[Sampling, Adjacency]] = [
    ("fixed", "replace-one"),
    ("poisson", "replace-one"),
    ("poisson", "add-remove"),
]


def make(
    s: float,
    m: int = 2763,
    sampling: Sampling = "fixed",
    adjacency: Adjacency = "replace-one",
    b: int = 25,
) -> PrivacyPlan:
    return PrivacyPlan(1.0, s, b, m, sampling, adjacency)


# --- the definition of one step -------------------------------------------------------


def mixture(rate: float, shift: float, std: float) -> Callable[[float], float]:
    """Density of (1 - rate) N(0, std^2) + rate N(shift, std^2)."""

    def density(x: float) -> float:
        centre = math.exp(-0.5 * (x / std) ** 2)
        moved = math.exp(-0.5 * ((x - shift) / std) ** 2)
        return ((1 - rate) * centre + rate * moved) / (std * math.sqrt(2 * math.pi))

    return density


def hockey_stick(
    p: Callable[[float], float], q: Callable[[float], float], eps: float, std: float
) -> float:
    def excess(x: float) -> float:
        return max(0.0, p(x) - math.exp(eps) * q(x))

    grid = np.linspace(-1 - 12 * std, 1 + 12 * std, 40)
    pieces = (quad(excess, a, b, epsabs=1e-12, limit=200) for a, b in pairwise(grid))
    return float(sum(value for value, _ in pieces))


def delta_of_one_step(plan: PrivacyPlan, eps: float) -> float:
    """The larger delta of its profiles, from their losses on a grid."""

    def delta(step: LossDistribution) -> float:
        beyond = np.maximum(step.points * step.spacing - eps, 0.0)
        return float(step.masses @ -np.expm1(-beyond))

    profiles = plan.sampler.dominating_pairs(plan)
    return max(delta(discretize_step(profile, 2.0**-13, 300)) for profile in profiles)


@pytest.mark.parametrize("eps", [-0.3125, -0.015625, 0.0, 0.0078125, 0.1875, 0.5])
@pytest.mark.parametrize(("s", "b", "m"), [(1.0, 25, 100), (0.7, 1, 40)])
def test_one_step_is_the_joined_hockey_stick(
    s: float, b: int, m: int, eps: float
) -> None:
    # In units of 2C/b; the grid holds these values of eps, where no rounding happens.
    joined, centre = mixture(b / m, 1.0, s), mixture(0.0, 0.0, s)
    pair = (joined, centre) if eps >= 0 else (centre, joined)
    expected = hockey_stick(*pair, eps, s)
    found = delta_of_one_step(make(s, m, b=b), eps)
    assert expected - 1e-10 <= found <= expected + 1e-7


@pytest.mark.parametrize("eps", [0.0, 0.0078125, 0.1875])
def test_one_poisson_step_counts_noise_in_units_of_the_clip(eps: float) -> None:
    # Noise 2Cs/b on examples that contribute up to C/b: in units of C/b, deviation 2s.
    s, b, m = 0.6, 25, 100
    std, rate = 2 * s, b / m
    out, one, other = (mixture(rate, shift, std) for shift in (0.0, 1.0, -1.0))
    found = {
        adjacency: delta_of_one_step(make(s, m, "poisson", adjacency, b), eps)
        for _, adjacency in KINDS[1:]
    }
    replaced = hockey_stick(one, other, eps, std)
    assert found["replace-one"] == pytest.approx(replaced, abs=1e-7)
    worse = max(hockey_stick(one, out, eps, std), hockey_stick(out, one, eps, std))
    assert found["add-remove"] == pytest.approx(worse, abs=1e-7)


# --- composition against an independent convolution ----------------------------------


def characteristic(
    s: float, rate: float, u: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """E[e^{iuL}] and E[e^{-L} e^{iuL}] of the joined loss L, without a grid of losses.

    Above 0, L has the law of log(M/N) under M; below 0, that of log(N/M) under N; the
    rest is at 0. Either region is x > 1/2.
    """
    nodes, weights = np.polynomial.legendre.leggauss(300)
    width = 1 + 14 * s
    x = 0.5 + width * (nodes + 1) / 2
    weights = weights * width / 2
    n = norm.pdf(x, 0, s)
    m = (1 - rate) * n + rate * norm.pdf(x, 1, s)
    loss = np.log(m / n)
    forward = np.exp(1j * np.outer(u, loss))
    at_zero = (1 - rate) * (2 * norm.cdf(0.5 / s) - 1)
    upper = forward @ (weights * m) + forward.conj() @ (weights * n) + at_zero
    lower = forward @ (weights * n) + forward.conj() @ (weights * m) + at_zero
    return upper, lower


def epsilon_by_inversion(parts: list[tuple[float, float, int]], delta: float) -> float:
    """Invert the product of characteristic functions (Gil-Pelaez) for every tail."""
    step = 0.05
    u = (np.arange(3500) + 0.5) * step
    upper, lower = np.ones_like(u, dtype=complex), np.ones_like(u, dtype=complex)
    for s, rate, steps in parts:
        p, q = characteristic(s, rate, u)
        upper, lower = upper * p**steps, lower * q**steps
    assert abs(upper[-1]) < 1e-12  # the cut is far enough

    def tail(transform: np.ndarray, eps: float) -> float:
        wave = (np.exp(-1j * u * eps) * transform).imag / u
        return 0.5 + float(wave.sum() * step / math.pi)

    def excess(eps: float) -> float:
        return tail(upper, eps) - math.exp(eps) * tail(lower, eps) - delta

    return float(brentq(excess, 1e-6, 5.0, xtol=1e-10))


@pytest.mark.parametrize(
    "parts",
    [
        [(1.0, 25 / 2763, 400)],
        [(2.0, 25 / 2763, 400)],
        [(3.0, 25 / 1200, 400)],
        [(1.5, 25 / 250, 40)],
        [(1.0, 25 / 2763, 100), (2.0, 25 / 2763, 150), (1.5, 25 / 1200, 50)],
    ],
)
def test_composition_equals_an_independent_convolution(
    parts: list[tuple[float, float, int]],
) -> None:
    expected = epsilon_by_inversion(parts, DELTA)
    charges = [(make(s, round(25 / rate)), steps) for s, rate, steps in parts]
    found = compute_epsilon(charges, DELTA)
    # Pessimistic, and hardly so.
    assert expected * (1 - 1e-6) <= found <= expected * 1.002


# --- golden figures (T = 400, b = 25, delta = 1e-4) ----------------------------------
# Computed with dp_accounting 0.6.0 beforehand; the fixed rows with the joined profile.

GOLDEN_2763 = {
    ("fixed", "replace-one"): (1.0143, 0.3186, 0.1836),
    ("poisson", "replace-one"): (0.5406, 0.2466, 0.1560),
    ("poisson", "add-remove"): (0.2764, 0.1166, 0.0721),
}
GOLDEN_FIXED = {
    2100: (1.375, 0.433, 0.250),
    1200: (2.557, 0.811, 0.469),
    8400: (0.293, 0.091, 0.052),
}


@pytest.mark.parametrize(("sampling", "adjacency"), KINDS)
def test_the_papers_setting_has_its_golden_figures(
    sampling: Sampling, adjacency: Adjacency
) -> None:
    golden = GOLDEN_2763[sampling, adjacency]
    for s, value in zip((1, 2, 3), golden, strict=True):
        found = make(s, 2763, sampling, adjacency).epsilon(steps=400, delta=DELTA)
        assert found == pytest.approx(value, abs=0.00005)


@pytest.mark.parametrize("m", GOLDEN_FIXED)
def test_other_sizes_have_their_golden_figures(m: int) -> None:
    for s, value in zip((1, 2, 3), GOLDEN_FIXED[m], strict=True):
        assert round(make(s, m).epsilon(400, DELTA), 3) == value


@pytest.mark.parametrize("s", [1, 2, 3])
@pytest.mark.parametrize("m", [1200, 2763, 8400])
def test_epsilon_lies_between_one_ordered_pair_and_the_renyi_bound(
    s: int, m: int
) -> None:
    # Batches of one ordered pair of datasets (all at -C, one of them moved to +C): a
    # true lower bound, reached by composing one half of the profile alone.
    one_pair = from_gaussian_mechanism(s, sampling_prob=25 / m).self_compose(400)
    lower = one_pair.get_epsilon_for_delta(DELTA)
    if (s, m) == (1, 2763):
        assert lower == pytest.approx(0.859, abs=0.001)
    charges = [(make(s, m), 400)]
    assert lower < compute_epsilon(charges, DELTA) < bound_epsilon(charges, DELTA)


# --- properties -----------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=12)
@given(st.floats(0.6, 6.0), st.integers(1, 100), st.integers(1, 100))
def test_a_wider_unit_and_a_fixed_size_cost_more(s: float, b: int, steps: int) -> None:
    # What lets charges of different adjacency be added up under replace-one.
    fixed, replacing, removing = (
        make(s, 100, *kind, b=b).epsilon(steps, 1e-5) for kind in KINDS
    )
    assert removing <= replacing * (1 + 1e-9)
    assert replacing <= fixed * (1 + 1e-9)


# --- charges of different kinds -------------------------------------------------------


def test_no_steps_cost_nothing_and_no_noise_everything() -> None:
    silent = make(0.0)
    assert compute_epsilon([], DELTA) == 0 == bound_epsilon([], DELTA)
    assert compute_epsilon([(silent, 0), (make(2), 0)], DELTA) == 0
    for charges in ([(silent, 1)], [(make(2), 5), (silent, 1)]):
        assert compute_epsilon(charges, DELTA) == math.inf
        assert bound_epsilon(charges, DELTA) == math.inf
    assert find_max_steps([], silent, DELTA, 100.0) == 0


def test_the_clip_and_its_computation_cost_nothing() -> None:
    plan = make(2.0)
    other = replace(plan, clip_norm=7.0, clipping="ghost")
    assert compute_epsilon([(plan, 100), (other, 300)], DELTA) == plan.epsilon(
        400, DELTA
    )


def test_order_of_charges_has_no_influence() -> None:
    charges = [(make(1.5), 10), (make(3.0, 1200), 30), (make(2.0), 20)]
    assert compute_epsilon(charges, DELTA) == pytest.approx(
        compute_epsilon(charges[::-1], DELTA)
    )


def test_mixed_adjacencies_are_accounted_under_replace_one() -> None:
    removing = make(2.0, 2763, "poisson", "add-remove")
    replacing = make(2.0, 2763, "poisson", "replace-one")
    mixed = [(removing, 300), (replacing, 100)]
    assert compute_epsilon(mixed, DELTA) == replacing.epsilon(400, DELTA)
    assert accountant.state_epsilon(mixed, DELTA).adjacency == "replace-one"
    # A plan without steps does not change the unit.
    same = [(removing, 300), (replacing, 0)]
    assert compute_epsilon(same, DELTA) == removing.epsilon(300, DELTA)


def test_statement_of_mixed_samplers_names_both() -> None:
    found = accountant.state_epsilon(
        [(make(2), 3), (make(2, 2763, "poisson"), 4)], DELTA
    )
    assert found.steps == 7
    assert "Poisson" in found.sampler
    assert "fixed-size" in found.sampler


@pytest.mark.parametrize(("sampling", "adjacency"), KINDS)
@pytest.mark.parametrize("past", [[], [(make(3.0, 1200), 37)]])
def test_the_last_step_that_fits_is_found_exactly(
    sampling: Sampling, adjacency: Adjacency, past: list[tuple[PrivacyPlan, int]]
) -> None:
    plan = make(2.0, 2763, sampling, adjacency)
    count = find_max_steps(past, plan, DELTA, 0.3)
    assert count > 0
    assert compute_epsilon([*past, (plan, count)], DELTA) <= 0.3
    assert compute_epsilon([*past, (plan, count + 1)], DELTA) > 0.3


@pytest.mark.parametrize("last", [1, 37, 315, 10**6])
@pytest.mark.parametrize("others", [0.0, 0.9999, 1.0])
def test_the_last_step_is_found_soon_whatever_others_cost(
    last: int, others: float
) -> None:
    # Where other charges cost nearly all, the first steps of a plan cost nothing more.
    tried = []

    def cost(steps: int) -> float:
        tried.append(steps)
        return max(others, math.sqrt(steps / last))

    assert accountant.find_largest_affordable(cost, 1.0, 0) == last
    assert len(tried) < 80


def test_a_spent_budget_leaves_no_steps_and_an_infinite_one_all() -> None:
    plan = make(2.0)
    spent = compute_epsilon([(plan, 50)], DELTA)
    assert find_max_steps([(plan, 50)], plan, DELTA, spent) == 0
    assert find_max_steps([(plan, 50)], plan, DELTA, spent / 2) == 0
    assert find_max_steps([], plan, DELTA, math.inf) == MAX_STEPS
    assert find_max_steps([], plan, DELTA, math.nan) == 0


@pytest.mark.parametrize(
    "delta", [0.0, -1e-4, 0.11, 1.0, math.nan, math.inf, 9e-13, 1e-160, True]
)
def test_a_delta_out_of_range_is_refused(delta: float) -> None:
    plan = make(2.0)
    for call in (
        lambda: plan.epsilon(10, delta),
        lambda: plan.statement(10, delta),
        lambda: bound_epsilon([], delta),
        lambda: find_max_steps([], plan, delta, 1.0),
    ):
        with pytest.raises(ValueError, match="delta="):
            call()


@pytest.mark.parametrize("steps", [-1, 1.5, True, math.inf, 10**9 + 1, 10**400])
def test_a_number_of_steps_out_of_range_is_refused(steps: int) -> None:
    with pytest.raises(ValueError, match="steps="):
        make(2.0).epsilon(steps, DELTA)
