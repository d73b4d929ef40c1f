"""Schedules of the convergence theorem, by hand."""

import pytest

from flwr_safedshb import theory


def test_strongly_convex_schedule_by_hand() -> None:
    # L = 2, mu = 1/2: gamma_t = 10/(t/2 + 480), beta_t = 1 - 48 gamma_t.
    schedule = theory.StronglyConvex(smoothness=2.0, strong_convexity=0.5)
    assert schedule.learning_rate(0) == pytest.approx(1 / 48)
    assert schedule.momentum(0) == pytest.approx(0.0, abs=1e-15)
    assert schedule.learning_rate(40) == pytest.approx(10 / 500)
    assert schedule.momentum(40) == pytest.approx(0.04)
    # Late: gamma_t = 10/(mu t), and momentum tends to 1.
    assert schedule.learning_rate(10**9) * 10**9 == pytest.approx(20.0, rel=1e-4)
    assert 1 - 1e-5 < schedule.momentum(10**9) < 1


@pytest.mark.parametrize("smoothness", [1e-3, 0.1, 1 / 3, 0.7, 24.0, 1e7])
def test_schedules_stay_where_momentum_must(smoothness: float) -> None:
    convex = theory.StronglyConvex(smoothness, smoothness / 50)
    other = theory.NonConvex(smoothness, 1.0, 0.1, 100)
    for step in range(200):
        assert 0.0 <= convex.momentum(step) < 1.0
    assert 0.0 <= other.momentum < 1.0


def test_non_convex_schedule_by_hand() -> None:
    # L = 1, L0 = 3/10, sbar = 3, T = 100: sqrt(81)/(6 sqrt(576000)) = 3/(2*758.947).
    schedule = theory.NonConvex(1.0, 0.3, 3.0, 100)
    assert schedule.learning_rate == pytest.approx(0.0019764, rel=1e-4)
    assert schedule.momentum == pytest.approx(1 - 24 * 0.0019764, rel=1e-5)
    # Without noise, and for small T, the largest rate that is allowed: 1/(24 L).
    for limited in (theory.NonConvex(2.0, 0.3, 0.0, 10), theory.NonConvex(2, 9, 1, 1)):
        assert limited.learning_rate == pytest.approx(1 / 48)
        assert limited.momentum == pytest.approx(0.0, abs=1e-15)
