"""Noise for a target: never over it, hardly under it."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_safedshb.privacy.accounting.calibration import _search_noise
from flwr_safedshb.privacy.plan import Adjacency, PrivacyPlan, Sampling

KINDS: list[tuple[Sampling, Adjacency]] = [
    ("fixed", "replace-one"),
    ("poisson", "replace-one"),
    ("poisson", "add-remove"),
]


def calibrate(
    target: float,
    kind: tuple[Sampling, Adjacency],
    steps: int = 400,
    delta: float = 1e-4,
    b: int = 25,
    m: int = 2763,
) -> PrivacyPlan:
    return PrivacyPlan.calibrate(
        target,
        delta,
        steps,
        clip_norm=1.0,
        batch_size=b,
        num_examples=m,
        sampling=kind[0],
        adjacency=kind[1],
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("s", [1.0, 3.0])
def test_round_trip(s: float, kind: tuple[Sampling, Adjacency]) -> None:
    plan = PrivacyPlan(1.0, s, 25, 2763, *kind)
    found = calibrate(plan.epsilon(400, 1e-4), kind)
    assert s <= found.noise_multiplier <= 1.02 * s
    assert (found.sampling, found.adjacency) == kind


@settings(derandomize=True, deadline=None, max_examples=8)
@given(
    st.floats(0.05, 20.0),
    st.sampled_from(KINDS),
    st.integers(1, 1000),
    st.sampled_from([(1, 50), (25, 2763), (10, 10)]),
    st.sampled_from([1e-3, 1e-6]),
)
def test_within_one_percent_and_never_over(
    target: float,
    kind: tuple[Sampling, Adjacency],
    steps: int,
    size: tuple[int, int],
    delta: float,
) -> None:
    plan = calibrate(target, kind, steps, delta, *size)
    assert 0.99 * target <= plan.epsilon(steps, delta) <= target


def test_fields_pass_through() -> None:
    plan = PrivacyPlan.calibrate(
        1.0, 1e-4, 10, clip_norm=4.0, batch_size=5, num_examples=50, clipping="ghost"
    )
    assert (plan.clip_norm, plan.batch_size, plan.num_examples) == (4.0, 5, 50)
    assert plan.clipping == "ghost"


def test_a_jump_in_the_cost_ends_on_the_safe_side() -> None:
    def cost(noise: float) -> float:
        return 2.0 if noise < 3.0 else 0.5

    found = _search_noise(cost, 1.0, 1.0, 2.0)
    assert found == pytest.approx(3.0, rel=1e-5)
    assert cost(found) <= 1.0


@pytest.mark.parametrize(
    ("target", "steps", "delta", "message"),
    [
        (0.0, 10, 1e-4, "target_epsilon=0.0"),
        (-1.0, 10, 1e-4, "target_epsilon=-1.0"),
        (math.inf, 10, 1e-4, "target_epsilon=inf"),
        (math.nan, 10, 1e-4, "target_epsilon=nan"),
        (1.0, 0, 1e-4, "steps=0"),
        (1.0, 10, 0.0, "delta=0.0"),
        (
            1e13,
            1,
            1e-4,
            "target_epsilon=10000000000000.0 needs a noise multiplier outside",
        ),
    ],
)
def test_refuses(target: float, steps: int, delta: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calibrate(target, KINDS[0], steps, delta)


def test_a_start_just_over_the_target_is_not_good_enough() -> None:
    def cost(noise: float) -> float:
        return 1 / noise

    assert cost(_search_noise(cost, 1.0, 1 / 1.005, 2.0)) <= 1.0
