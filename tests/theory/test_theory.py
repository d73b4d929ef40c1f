from collections.abc import Callable

import numpy as np
import pytest

from flwr_safedshb import theory


@pytest.mark.parametrize(
    ("n", "f", "sharp", "paper"),
    [(7, 3, 12.0, 48.0), (10, 2, 4 / 3, 16 / 9), (20, 6, 3.0, 5.25), (9, 0, 0.0, 0.0)],
)
def test_smea_constants_by_hand(n: int, f: int, sharp: float, paper: float) -> None:
    assert theory.kappa_smea(n, f) == pytest.approx(sharp)
    assert theory.kappa_smea_paper(n, f) == pytest.approx(paper)
    if f:
        ratio = theory.kappa_smea(n, f) / theory.kappa_smea_paper(n, f)
        assert ratio == pytest.approx((n - 2 * f) / (n - f))
        assert theory.kappa_smea(n, f) == 4 * theory.kappa_lower_bound(n, f)


def test_gap_of_a_stopped_search() -> None:
    # 3/1 * (1 + sqrt(4))^2 for a subset three times worse than the bound.
    assert theory.kappa_smea(7, 3, gap=3.0) == pytest.approx(27.0)
    assert theory.kappa_smea(7, 3, gap=np.inf) == np.inf
    with pytest.raises(ValueError, match="gap"):
        theory.kappa_smea(7, 3, gap=-0.1)


def test_filter_constants_by_hand() -> None:
    # n = 7, f = 3: 84/1 + 6/4, and not 72, the paper's other form.
    assert theory.kappa_filter(7, 3) == pytest.approx(85.5)
    assert theory.filter_eta(7, 3) == pytest.approx(56.0)
    assert theory.kappa_filter(10, 0) == 0.0
    assert theory.filter_eta(10, 0) == pytest.approx(2.0)


def test_variance_constants_by_hand() -> None:
    # n = 8, f = 2: f/(n-2f) = 1/2.
    assert theory.kappa_trimmed_mean(8, 2) == pytest.approx(4.5)
    assert theory.kappa_krum(8, 2) == pytest.approx(9.0)
    assert theory.kappa_geometric_median(8, 2) == pytest.approx(9.0)
    assert theory.kappa_median(8, 2) == pytest.approx(9.0)
    assert theory.kappa_nnm(8, 2, 9.0) == pytest.approx(80 / 3)


@pytest.mark.parametrize(("n", "f"), [(4, 2), (0, 0), (3, -1), (2, 5)])
def test_impossible_numbers_are_refused(n: int, f: int) -> None:
    for function in (
        theory.kappa_smea,
        theory.kappa_smea_paper,
        theory.kappa_filter,
        theory.filter_eta,
        theory.kappa_lower_bound,
        theory.kappa_krum,
        theory.kappa_median,
        theory.kappa_trimmed_mean,
    ):
        with pytest.raises(ValueError, match=f"[nf]={n if n < 1 else f}"):
            function(n, f)


# The convergence theorem. By hand: n = 5, f = 1, d = 8, b = 4, m = 8, sigma = 2,
# sigma_DP = 1/2, kappa = 1/2.


def test_effective_variance_by_hand() -> None:
    # sigma_b^2 = 2 (1 - 4/8) 4/4 = 1.
    assert theory.batch_variance(2.0, b=4, m=8) == pytest.approx(1.0)
    # (1 + 8/4)/4 + 4/2 (1 + 36/4 (1 + 8/4)) = 3/4 + 2 * 28 = 56.75.
    found = theory.effective_variance(5, 1, 8, 1.0, 0.5, 0.5)
    assert found == pytest.approx(56.75)


def test_effective_variance_at_its_limits() -> None:
    # A full batch has no sampling variance, and nothing is left without noise.
    assert theory.batch_variance(2.0, b=8, m=8) == 0.0
    assert theory.effective_variance(5, 1, 8, 0.0, 0.0, 3.0) == 0.0
    # kappa = 0, f = 0: the variance of a mean of n, sampling and noise.
    assert theory.effective_variance(4, 0, 8, 1.0, 0.5, 0.0) == pytest.approx(3 / 4)
    # A variance: it grows with the square of the unit of gradients.
    one = theory.effective_variance(5, 1, 8, theory.batch_variance(2, 4, 8), 0.5, 0.5)
    ten = theory.effective_variance(5, 1, 8, theory.batch_variance(20, 4, 8), 5, 0.5)
    assert ten == pytest.approx(100 * one)


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


def test_strongly_convex_bound_by_hand() -> None:
    # L = 2, mu = 1/2, kappa = 1/2, Gcov = 3, sbar^2 = 1/4, L0 = 5, T = 10:
    # 960/2 * 9/(1/2) = 8640; 115200 * 2/4/(10/4) = 23040; 115200*4*5/(100/4) = 92160.
    found = theory.strongly_convex_bound(2.0, 0.5, 0.5, 3.0, 0.25, 5.0, 10)
    assert found.heterogeneity == pytest.approx(8640)
    assert found.noise == pytest.approx(23040)
    assert found.start == pytest.approx(92160)
    assert found.total == pytest.approx(123840)


def test_non_convex_bound_by_hand() -> None:
    # kappa = 1/2, Gcov = 3: 480/2 * 9 = 2160; L = 2, L0 = 5, sbar^2 = 1/4, T = 100:
    # sqrt(1555200 * 10) (1/2)/10 = 197.18; 270 * 10/100 = 27.
    found = theory.non_convex_bound(2.0, 0.5, 3.0, 0.25, 5.0, 100)
    assert found.heterogeneity == pytest.approx(2160)
    assert found.noise == pytest.approx(197.18, rel=1e-4)
    assert found.start == pytest.approx(27)


def test_bounds_as_the_paper_scales_them() -> None:
    def convex(steps: int, unit: float = 1.0) -> theory.Bound:
        return theory.strongly_convex_bound(2, 0.5, 0.5, unit, unit**2, 5, steps)

    def other(steps: int, gap: float = 5.0) -> theory.Bound:
        return theory.non_convex_bound(2.0, 0.5, 1.0, 1.0, gap, steps)

    # Four times the steps.
    assert convex(400).noise == pytest.approx(convex(100).noise / 4)
    assert convex(400).start == pytest.approx(convex(100).start / 16)
    assert other(400).noise == pytest.approx(other(100).noise / 2)
    assert other(400).start == pytest.approx(other(100).start / 4)
    # T to infinity leaves what adversaries gain from heterogeneity.
    for bound in (convex, other):
        assert bound(10**18).total == pytest.approx(bound(1).heterogeneity, rel=1e-6)
    # The unit of gradients squared.
    assert convex(100, unit=10.0).noise == pytest.approx(100 * convex(100).noise)
    assert convex(1, 10.0).heterogeneity == 100 * convex(1).heterogeneity
    # f = 0: no kappa, no heterogeneity.
    assert theory.strongly_convex_bound(2, 0.5, 0.0, 9, 1, 5, 1).heterogeneity == 0
    assert theory.non_convex_bound(2.0, 0.0, 9.0, 1.0, 5.0, 1).heterogeneity == 0


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


def test_lower_bound_by_hand() -> None:
    # n = 10, f = 2, m = 100, d = 50, epsilon = 1/2, G = 1/10, C = 2: (C/(eps m))^2 =
    # 1/625; times 50/10 = 0.008; times 2/10 = 0.00032; (2/10)/100 = 0.002.
    found = theory.lower_bound(10, 2, 100, 50, 0.5, 0.1, clip_norm=2.0)
    assert found.privacy == pytest.approx(0.008)
    assert found.both == pytest.approx(0.00032)
    assert found.robustness == pytest.approx(0.002)
    assert found.dominant == "privacy"
    assert found.dominance == pytest.approx(4.0)
    assert found.total == pytest.approx(0.01032)


def test_lower_bound_at_its_limits() -> None:
    one = theory.lower_bound(10, 2, 100, 50, 0.5, 0.1)
    # Without adversaries only privacy costs; d-fold dimension costs d-fold there alone.
    alone = theory.lower_bound(10, 0, 100, 50, 0.5, 0.1)
    assert alone.terms == {"privacy": one.privacy, "both": 0, "robustness": 0}
    assert alone.dominance == np.inf
    wide = theory.lower_bound(10, 2, 100, 100, 0.5, 0.1)
    assert wide.privacy == pytest.approx(2 * one.privacy)
    assert wide.both == one.both
    # Half of epsilon costs what half of the examples cost, and heterogeneity neither.
    half = theory.lower_bound(10, 2, 50, 50, 0.5, 0.1)
    assert half == theory.lower_bound(10, 2, 100, 50, 0.25, 0.1)
    assert half.privacy == pytest.approx(4 * one.privacy)
    assert half.robustness == one.robustness
    # No privacy asked for: what heterogeneity costs.
    free = theory.lower_bound(10, 2, 100, 50, 1e12, 0.1)
    assert free.dominant == "robustness"
    assert free.total == pytest.approx(0.002)


def test_what_the_lower_bound_assumes() -> None:
    def violations(
        m: int = 1000, epsilon: float = 1.0, delta: float = 1e-6, G: float = 0.1
    ) -> str:
        return "; ".join(theory.lower_bound_violations(10, 2, m, epsilon, delta, G))

    assert violations() == ""
    assert violations(epsilon=14.0).startswith(
        "epsilon=14 must be at most log(1/delta)"
    )
    assert "n*delta=0.001 must be below 1/m=0.001" in violations(delta=1e-4)
    assert "lower delta below 0.0001" in violations(delta=1e-4)
    assert "must be at least 2^-m" in violations(m=5, delta=1e-9)
    # kappa_lb = 16 * 2 * 6/64 = 3, and G may be sqrt(3).
    assert violations(G=1.7) == ""
    assert "heterogeneity=1.8 must be at most 1.732" in violations(G=1.8)
    assert theory.lower_bound_violations(10, 0, 1000, 1.0, 1e-6, 5.0) == ()
    # The paper's own setting is none of the lower bound's: n delta is above 1/m.
    found = theory.lower_bound_violations(7, 3, 2763, 1.0143, 1e-4)
    assert len(found) == 1
    assert found[0].startswith("n*delta=0.0007")


@pytest.mark.parametrize(("n", "f"), [(3, 1), (7, 3), (10, 2), (41, 20)])
def test_nobody_can_tell_the_two_worlds_apart(n: int, f: int) -> None:
    # The example of the robustness-only bound, with C = 1: clients 0..f-1 hold x = 1.
    held = np.repeat([1.0, -1.0], [f, n - f])
    worlds = [held[f:], held[: n - f]]  # whom the honest clients are
    means = [world.mean() for world in worlds]
    spreads = [np.var(2 * (0.3 - world)) for world in worlds]  # of gradients at 0.3
    assert max(spreads) == pytest.approx(theory.kappa_lb(n, f))
    assert min(spreads) == pytest.approx(0.0)
    # The best answer lies half way, and has this excess loss in both.
    answer = sum(means) / 2
    for mean, world in zip(means, worlds, strict=True):
        excess = np.mean((answer - world) ** 2) - np.mean((mean - world) ** 2)
        bound = theory.robustness_lower_bound(n, f, np.sqrt(max(spreads)))
        assert excess == pytest.approx(bound)


def test_kappa_lb_by_hand() -> None:
    assert theory.kappa_lb(10, 2) == pytest.approx(3.0)
    assert theory.kappa_lb(7, 3) == pytest.approx(3.0)
    assert theory.kappa_lb(9, 0) == 0.0
    # 2/(16 * 6) * 3 = (f/(n-f))^2 = 1/16.
    assert theory.robustness_lower_bound(10, 2, 3**0.5) == pytest.approx(1 / 16)


def test_mean_estimation_bound_by_hand() -> None:
    # n = 10, f = 2, h = 8, d = 64, sigma = 1/2, kappa = 4/9, G = 3: (5/3)^2 * 64/4/8,
    # 4/9 * 1/4 * 9/8, 4/9 * 9.
    found = theory.mean_estimation_bound(10, 2, 64, 0.5, 4 / 9, 3.0)
    assert found.privacy == pytest.approx(50 / 9)
    assert found.both == pytest.approx(1 / 8)
    assert found.robustness == pytest.approx(4.0)
    # (2.35702 + 0.35355 + 2)^2.
    assert found.combined == pytest.approx(22.1875, rel=1e-4)
    # f = 0 is the mean's own error, without noise that of heterogeneity alone.
    assert theory.mean_estimation_bound(10, 0, 64, 0.5, 0.0).total == 64 / 4 / 10
    assert theory.mean_estimation_bound(10, 2, 64, 0.0, 1.0, 3.0).terms == {
        "privacy": 0.0, "both": 0.0, "robustness": 9.0,
    }  # fmt: skip


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
        (lambda: theory.kappa_lb(4, 2), "f=2 needs n > 2f"),
        (lambda: theory.closed_form_noise_std(1, 9, 8, 1, 1.0, 0.1), "b=9"),
        (lambda: theory.mean_estimation_bound(7, 3, 9, np.inf, 1.0), "noise_std=inf"),
    ],
)
def test_impossible_values_are_named(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
