"""What adversaries can do to one step, and the estimate for a training."""

from collections.abc import Callable

import numpy as np
import pytest

from flwr_safedshb import theory
from flwr_safedshb.theory.resilience import MARGIN


def test_pushes_add_up_where_a_model_with_momentum_swings() -> None:
    assert theory.swing_factor(0.99, 1.0, 0.25) == pytest.approx(5.0)
    assert theory.swing_factor(0.99, 0.5, 0.5) == pytest.approx(5.0)
    # Overdamped: each push for itself.
    assert theory.swing_factor(0.0, 1.0, 0.25) == 1.0
    assert theory.swing_factor(0.99, 1.0, 0.0) == 1.0  # unknown


def test_a_training_withstands_while_the_gradient_is_out_of_reach() -> None:
    assert theory.withstands(0.99 * MARGIN, 1.0)
    assert not theory.withstands(1.01 * MARGIN, 1.0)
    assert not theory.withstands(0.6 * MARGIN, 1.0, 2.0)


@pytest.mark.parametrize(
    ("given", "words"),
    [((1.0, 1.0, 1.0), "momentum"), ((0.9, 0.0, 1.0), "learning_rate")],
)
def test_what_makes_no_sense_is_refused(
    given: tuple[float, float, float], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        theory.swing_factor(*given)
    with pytest.raises(ValueError, match="smoothness"):
        theory.swing_factor(0.9, 1.0, -1.0)


def test_mean_estimation_bound_by_hand() -> None:
    # n = 10, f = 2, h = 8, d = 64, sigma = 1/2, kappa = 4/9, G = 3: (5/3)^2 * 64/4/8,
    # 4/9 * 1/4, 4/9 * 9.
    found = theory.mean_estimation_bound(10, 2, 64, 0.5, 4 / 9, 3.0)
    assert found.privacy == pytest.approx(50 / 9)
    assert found.both == pytest.approx(1 / 9)
    assert found.robustness == pytest.approx(4.0)
    # (2.35702 + 0.33333 + 2)^2.
    assert found.combined == pytest.approx(21.9994, rel=1e-4)
    # f = 0 is the mean's own error, without noise that of heterogeneity alone.
    assert theory.mean_estimation_bound(10, 0, 64, 0.5, 0.0).total == 64 / 4 / 10
    assert theory.mean_estimation_bound(10, 2, 64, 0.0, 1.0, 3.0).terms == {
        "privacy": 0.0, "both": 0.0, "robustness": 9.0,
    }  # fmt: skip


def test_batches_and_the_stopping_radius_by_hand() -> None:
    # h = 4, d = 16, s = 1/2, kappa = 4, Gcov = 3, sigma_b^2 = 1/4: (1/2 + 2)^2/4, and
    # 2 (3 + (1 + 2)/2 + 1/2).
    found = theory.mean_estimation_bound(5, 1, 16, 0.5, 4.0, 3.0, 0.25)
    assert found.sampling == pytest.approx(25 / 16)
    assert found.total == pytest.approx(9 * 16 / 4 / 4 + 1 + 36 + 25 / 16)
    assert found.combined == pytest.approx((3 + 1 + 6 + 1.25) ** 2)
    assert theory.stopping_radius(5, 1, 16, 0.5, 4.0, 3.0, 0.25) == pytest.approx(10.0)
    assert theory.stopping_radius(5, 0, 16, 0.5, 0.0, 3.0, 0.25) == 0.0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: theory.batch_variance(1.0, 9, 8), "b=9 must be at most m=8"),
        (lambda: theory.batch_variance(-1.0, 8, 8), "gradient_std=-1"),
        (lambda: theory.effective_variance(4, 2, 8, 0.0, 0.0, 1.0), "f=2 needs n > 2f"),
        (lambda: theory.effective_variance(5, 1, 0, 0.0, 0.0, 1.0), "d=0"),
        (lambda: theory.StronglyConvex(1.0, 2.0), "strong_convexity=2.0 must be at mo"),
        (lambda: theory.StronglyConvex(1.0, 0.0), "strong_convexity=0.0 must be finit"),
        (lambda: theory.NonConvex(1.0, 1.0, np.nan, 5), "effective_std=nan"),
        (lambda: theory.NonConvex(1.0, 1.0, 1.0, 0), "steps=0"),
        (lambda: theory.noise_in_momentum(1.0, 1.0), "momentum=1.0 must lie in"),
        (lambda: theory.kappa_lb(4, 2), "f=2 needs n > 2f"),
        (lambda: theory.closed_form_noise_std(1, 9, 8, 1, 1.0, 0.1), "b=9"),
        (lambda: theory.mean_estimation_bound(7, 3, 9, np.inf, 1.0), "noise_std=inf"),
    ],
)
def test_impossible_values_are_named(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
