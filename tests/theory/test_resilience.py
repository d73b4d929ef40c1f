"""What adversaries can do to one step, and the estimate for a training."""

from collections.abc import Callable

import numpy as np
import pytest

from flwr_safedshb import theory
from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.attacks import Strongest
from flwr_safedshb.theory.resilience import DOES_NOT_PAY, PAYS


def test_no_aggregate_is_farther_than_the_push_radius() -> None:
    """Colluders stand at one honest client and go as far as SMEA lets them."""
    n, f, d, s, steps = 7, 3, 12, 0.5, 40
    radius = theory.push_radius(n, f, d, s, theory.kappa_smea(n, f), steps)
    rng, worst = np.random.default_rng(0), 0.0
    for _ in range(steps):
        honest = s * rng.normal(size=(n - f, d))
        sent = Strongest()(honest, f, rng, SMEA())
        moved = SMEA()(np.vstack((honest, sent)), f) - honest.mean(axis=0)
        worst = max(worst, float(np.linalg.norm(moved)))
    assert 0.2 * radius < worst < radius


def test_the_push_radius_by_hand() -> None:
    # h = 4, d = 16, s = 1/2, kappa = 4, T = 1: 2 (3 + (sqrt(3) + 4 + 2.4477)/4 + 1/2).
    found = theory.push_radius(5, 1, 16, 0.5, 4.0, 1, 3.0, 0.25)
    assert found == pytest.approx(7.0 + (3**0.5 + 4.0 + 2.44775) / 2, rel=1e-5)
    assert theory.push_radius(5, 0, 16, 0.5, 0.0, 9) == 0.0


def test_a_training_withstands_while_the_push_is_short_and_goes_nowhere() -> None:
    given = {"signal": 2.0, "distance": 10.0}
    assert theory.attack_ratios(1.0, 2.0, 10.0, 5.0) == (0.5, 0.5)

    def predict(push: float, path: float) -> str:
        return theory.predict_withstanding(push, **given, path=path)

    assert predict(1.99, 20.0) == "will withstand"
    assert predict(2.01, 20.0) == "cannot say"
    assert predict(1.99, 26.0) == "cannot say"
    assert predict(5.0, 20.0) == "will not withstand"
    assert predict(1.0, 180.0) == "will not withstand"
    with pytest.raises(ValueError, match=r"signal=0\.0 must be finite and above 0"):
        theory.predict_withstanding(1.0, 0.0, 1.0, 1.0)


def test_many_clients_gain_over_one_alone() -> None:
    few, many = (
        theory.compare_with_alone(n, f, 69, theory.kappa_smea(n, f), 3.6)
        for n, f in ((7, 3), (50, 5))
    )
    assert few < DOES_NOT_PAY < PAYS < many
    # By hand: h = 4, d = 16, kappa K = 4: sqrt(4 * 16/4)/(2 + 4 + 3.6).
    assert theory.compare_with_alone(5, 1, 16, 2.0, 2.0) == pytest.approx(4.0 / 9.6)


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
