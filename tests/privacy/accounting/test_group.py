"""Epsilon of a group: never below the truth, which small cases tell exactly."""

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import norm

from flwr_safedshb.privacy.accounting.group_loss import compute_divergences
from flwr_safedshb.privacy.plan import PrivacyPlan

Floats = NDArray[np.float64]
PAPER = PrivacyPlan(1.0, 1.0, 25, 2763)


def densities(plan: PrivacyPlan, values: Floats, x: Floats) -> Floats:
    """Return the density of a release at x: the mean over all batches, literally.

    In units of 2C/b, so that a value of 1/2 is a gradient of norm C.
    """
    batches = itertools.combinations(range(plan.num_examples), plan.batch_size)
    means = [values[list(batch)].sum() for batch in batches]
    found: Floats = np.mean(
        [norm.pdf(x, mean, plan.noise_multiplier) for mean in means], axis=0
    )
    return found


def literal_divergence(
    plan: PrivacyPlan, one: Floats, other: Floats, epsilon: float
) -> float:
    x = np.linspace(-9.0, 9.0, 1801)
    over = densities(plan, one, x) - math.exp(epsilon) * densities(plan, other, x)
    return float(np.trapezoid(np.maximum(over, 0.0), x))


@pytest.mark.parametrize(("batch", "group"), [(2, 1), (2, 2), (3, 2), (3, 3), (2, 4)])
def test_no_neighbours_of_a_small_plan_exceed_the_bound(batch: int, group: int) -> None:
    plan = PrivacyPlan(1.0, 0.8, batch, 6)
    (pair,) = plan.sampler.group_pairs(plan, group)
    epsilons = np.array([0.0, 0.05, 0.3, 1.0, 2.0, 4.0])
    bounds = compute_divergences(pair, epsilons)  # type: ignore[arg-type]
    rng, closest = np.random.default_rng(batch * group), np.zeros(len(epsilons))
    for trial in range(24):
        one = rng.uniform(-0.5, 0.5, 6)
        if trial % 3:  # as far away as it gets
            one = 0.5 * rng.choice([-1.0, 1.0], 6)
        other = one.copy()
        other[:group] = rng.uniform(-0.5, 0.5, group) if trial % 2 else -one[:group]
        if trial == 1:  # all one way, and others the other way
            one[:group], one[group:], other[:] = 0.5, -0.5, -0.5
        found = [literal_divergence(plan, one, other, each) for each in epsilons]
        assert (np.array(found) <= bounds + 1e-5).all()  # of the quadrature
        closest = np.maximum(closest, np.array(found) / bounds)
    assert closest.max() > 0.99


def test_a_group_of_one_is_an_example() -> None:
    (pair,) = PAPER.sampler.group_pairs(PAPER, 1)
    q, steps = PAPER.sampling_rate, np.array([0.0, 0.01, 0.5, 3.0])
    ratio = 1 + np.expm1(steps) / q
    x = np.log(ratio) + 0.5
    known = q * (norm.cdf(1 - x) - ratio * norm.cdf(-x))
    assert compute_divergences(pair, steps) == pytest.approx(known, rel=1e-9)  # type: ignore[arg-type]


# What examples of opposite gradients attain, by composing their one pair alone.
@pytest.mark.parametrize(
    ("group", "attained"), [(2, 1.89), (5, 5.44), (10, 12.6), (20, 30.9)]
)
def test_group_is_above_what_is_attained_and_below_groups_of_pure_privacy(
    group: int, attained: float
) -> None:
    found = PAPER.epsilon(400, 1e-4, group=group)
    assert attained <= found <= 1.25 * attained
    # k epsilon at k e^((k-1) epsilon) delta is the usual bound, and larger.
    if group == 2:
        delta = 1e-4 / (2 * math.exp(1.2))
        assert found < 2 * PAPER.epsilon(400, delta)


def compose_literally(log_ratio: Floats, masses: Floats, steps: int) -> Floats:
    """Return delta at 0, 1 and 2 of a loss on a grid, rounded up, by convolution."""
    spacing, total = 5e-3, np.array([1.0])
    start = math.ceil(log_ratio.min() / spacing)
    single = np.bincount(np.ceil(log_ratio / spacing).astype(int) - start, masses)
    for _ in range(steps):
        total = np.convolve(total, single)
    losses = (np.arange(len(total)) + steps * start) * spacing
    rest = losses[:, None] - np.array([0.0, 1.0, 2.0])
    found: Floats = (total[:, None] * np.maximum(-np.expm1(-rest), 0.0)).sum(axis=0)
    return found


@pytest.mark.parametrize(("sampling", "group"), [("poisson", 3), ("whole", 2)])
def test_other_samplers_compose_their_mixtures(sampling: str, group: int) -> None:
    """Two steps, by a convolution on a fine grid."""
    batch = 8 if sampling == "whole" else 2
    plan = PrivacyPlan(1.0, 2.0, batch, 8, sampling=sampling)
    x = np.linspace(-30, 30, 30_001)
    if sampling == "poisson":
        q, s = 0.25, 4.0
        counts = [math.comb(group, j) * q**j * (1 - q) ** (group - j) for j in range(4)]
        one, other = (
            sum(w * norm.pdf(x, sign * j, s) for j, w in enumerate(counts))
            for sign in (1, -1)
        )
    else:
        one, other = norm.pdf(x, group, 2.0), norm.pdf(x, 0, 2.0)
    deltas = compose_literally(np.log(one / other), one * (x[1] - x[0]), 2)
    for epsilon, delta in zip((0.0, 1.0, 2.0), deltas, strict=True):
        if 1e-12 < delta < 0.1:
            found = plan.epsilon(2, float(delta), group=group)
            assert found == pytest.approx(epsilon, abs=0.02)


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_larger_groups_cost_more_and_noise_helps(sampling: str) -> None:
    plan = PrivacyPlan(1.0, 2.0, 25, 2763, sampling=sampling)
    found = [plan.epsilon(100, 1e-5, group=group) for group in (1, 2, 3, 7)]
    assert found == sorted(found)
    assert found[0] < found[1] < found[2]
    assert PrivacyPlan(1.0, 0.0, 25, 2763).epsilon(1, 1e-5, group=2) == math.inf
    assert plan.epsilon(0, 1e-5, group=2) == 0.0


@pytest.mark.parametrize("group", [0, -1, 2.0, False, 2764, 201])
def test_a_group_is_a_number_of_examples(group: int) -> None:
    with pytest.raises(ValueError, match="group="):
        PAPER.epsilon(1, 1e-4, group=group)


def test_a_small_noise_and_a_large_group_have_a_finite_bound() -> None:
    for noise in (0.05, 0.3, 50.0):
        plan = PrivacyPlan(1.0, noise, 25, 400)
        found = plan.epsilon(3, 1e-6, group=30)
        assert plan.epsilon(3, 1e-6) <= found < math.inf
