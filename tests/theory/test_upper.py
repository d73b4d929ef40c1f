"""What is proved to be reached: one aggregate, the corollaries, the closed form."""

from collections.abc import Callable

import numpy as np
import pytest

from flwr_safedshb import theory


def test_noise_in_closed_form_by_hand() -> None:
    # C = 1, b = 25, m = 2763, T = 400, delta = 1e-4, epsilon = 1:
    # 25 * 20 sqrt(9.21034)/2763 = 0.549 < 1, so 2/25; at epsilon = 1/4 it is 2.1968.
    def noise(epsilon: float, m: int = 2763, constant: float = 1.0) -> float:
        return theory.closed_form_noise_std(1.0, 25, m, 400, epsilon, 1e-4, constant)

    assert noise(1.0) == pytest.approx(0.08)
    assert noise(0.25) == pytest.approx(0.08 * 2.1968, rel=1e-4)
    assert noise(0.25, constant=3.0) == pytest.approx(3 * noise(0.25))
    # 1/epsilon and 1/m where the budget binds; more examples buy nothing where not.
    assert noise(0.125) == pytest.approx(2 * noise(0.25))
    assert noise(0.125, m=5526) == pytest.approx(noise(0.25))
    assert noise(1.0, m=10**6) == noise(1.0)
    with pytest.raises(ValueError, match=r"epsilon=10 must be at most log.*9\.21"):
        noise(10)


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


def test_corollaries_by_hand() -> None:
    # n = 8, f = 2, m = 100, d = 32, epsilon = 1/2, log(1/delta) = 4, G = 3: C/(eps m)
    # = 1/50; squares 4 * 32/8/2500, 4 * 1/4/2500, 9/4; roots sqrt(16)/50, 1/50, 9/4.
    given = (8, 2, 100, 32, 0.5, np.exp(-4.0), 3.0)
    convex = theory.strongly_convex_corollary(*given)
    assert convex.privacy == pytest.approx(16 / 2500)
    assert convex.both == pytest.approx(1 / 2500)
    assert convex.robustness == pytest.approx(9 / 4)
    other = theory.non_convex_corollary(*given)
    assert other.privacy == pytest.approx(4 / 50)
    assert other.both == pytest.approx(1 / 50)
    assert other.robustness == pytest.approx(9 / 4)


def test_the_corollary_is_the_lower_bound_but_for_a_logarithm() -> None:
    lower = theory.lower_bound(10, 2, 100, 50, 0.5, 0.1, clip_norm=2.0)
    upper = theory.strongly_convex_corollary(10, 2, 100, 50, 0.5, 1e-6, 0.1, 2.0)
    log = np.log(1e6)
    assert upper.privacy == pytest.approx(log * lower.privacy)
    assert upper.both == pytest.approx(log * lower.both)
    assert upper.robustness == lower.robustness


def test_what_the_corollaries_assume() -> None:
    assert theory.corollary_violations(9, 3, 1.0, 1e-6) == ()
    (found,) = theory.corollary_violations(7, 3, 1.0, 1e-6)
    assert found.startswith("n=7 must be at least (2 + eta) f=9 with eta=1")
    assert "take eta=0.333" in found
    assert theory.corollary_violations(7, 3, 1.0, 1e-6, eta=1 / 3) == ()
    (found,) = theory.corollary_violations(9, 3, 14.0, 1e-6)
    assert found.startswith("epsilon=14 must be at most log(1/delta)=13.82")
    assert theory.corollary_violations(5, 0, 1.0, 1e-6) == ()


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
        (lambda: theory.lower_bound(7, 3, 10, 5, 0.0), "epsilon=0.0"),
        (lambda: theory.lower_bound(6, 3, 10, 5, 1.0), "f=3 needs n > 2f"),
        (lambda: theory.lower_bound(7, 3, 10, 5, 1.0, -1.0), "heterogeneity=-1"),
        (lambda: theory.lower_bound_violations(7, 3, 9, 1.0, 1.0), "delta=1.0"),
        (lambda: theory.term_violations(7, 3, 9, 0.0, 0.1), "epsilon=0.0"),
        (lambda: theory.joint_lower_bound(6, 3, 9, 1.0, 0.1), "f=3 needs n > 2f"),
        (lambda: theory.strongly_convex_corollary(7, 3, 9, 5, 1.0, 2.0), "delta=2.0"),
        (lambda: theory.corollary_violations(7, 3, 1.0, 0.1, 0.0), "eta=0.0"),
        (lambda: theory.noise_in_momentum(1.0, 1.0), "momentum=1.0 must lie in"),
        (lambda: theory.kappa_lb(4, 2), "f=2 needs n > 2f"),
        (lambda: theory.closed_form_noise_std(1, 9, 8, 1, 1.0, 0.1), "b=9"),
        (lambda: theory.mean_estimation_bound(7, 3, 9, np.inf, 1.0), "noise_std=inf"),
    ],
)
def test_impossible_values_are_named(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
