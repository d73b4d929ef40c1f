"""The convergence theorem: bounds by hand, and against a worst adversary."""

from collections.abc import Callable

import numpy as np
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


CONVEX = (theory.strongly_convex_bound, theory.strongly_convex_bound_paper)
OTHER = (theory.non_convex_bound, theory.non_convex_bound_paper)


def test_strongly_convex_bounds_by_hand() -> None:
    # L = 2, mu = 1/2, kappa = 1/2, Gcov = 3, sbar^2 = 1/4, L0 = 5, T = 40: T' = 1000.
    given = (2.0, 0.5, 0.5, 3.0, 0.25, 5.0, 40)
    paper = theory.strongly_convex_bound_paper(*given)
    # 960/2 * 9/(1/2); 115200 * 2/4/(1000/4); 57600 * 4 * 5/(10^6/4).
    assert paper.heterogeneity == pytest.approx(8640)
    assert paper.noise == pytest.approx(230.4)
    assert paper.start == pytest.approx(4.608)
    assert paper.total == pytest.approx(8875.008)
    ours = theory.strongly_convex_bound(*given)
    # 2.3/2 * 9/(1/2); 302 * 2/4/(1000/4); 5 * 0.96^10.
    assert ours.heterogeneity == pytest.approx(20.7)
    assert ours.noise == pytest.approx(0.604)
    assert ours.start == pytest.approx(5 * 0.96**10)


def test_non_convex_bounds_by_hand() -> None:
    # kappa = 1/2, Gcov = 3: 480/2 * 9 = 2160; L = 2, L0 = 5, sbar^2 = 1/4, T = 100:
    # sqrt(1555200 * 10) (1/2)/10 = 197.18; 270 * 10/100 = 27.
    given = (2.0, 0.5, 3.0, 0.25, 5.0, 100)
    paper = theory.non_convex_bound_paper(*given)
    assert paper.heterogeneity == pytest.approx(2160)
    assert paper.noise == pytest.approx(197.18, rel=1e-4)
    assert paper.start == pytest.approx(27)
    # 4.04/2 * 9; 25.352 sqrt(10)/20; 5.2.
    ours = theory.non_convex_bound(*given)
    assert ours.heterogeneity == pytest.approx(18.18)
    assert ours.noise == pytest.approx(25.352 * 10**0.5 / 20)
    assert ours.start == pytest.approx(5.2)


@pytest.mark.parametrize("bounds", [CONVEX, OTHER])
def test_ours_is_never_the_larger(bounds: tuple) -> None:  # type: ignore[type-arg]
    for seed in range(50):
        rng = np.random.default_rng(seed)
        kappa, spread, variance, gap = rng.uniform(0, 5, size=4)
        smooth = rng.uniform(0.5, 3.0)
        first = (smooth, smooth / rng.uniform(1, 9)) if bounds is CONVEX else (smooth,)
        steps = int(rng.integers(1, 5000))
        given = (*first, kappa, spread, variance, gap, steps)
        ours, paper = (bound(*given) for bound in bounds)
        assert ours.total <= paper.total


@pytest.mark.parametrize("steps", [1, 2, 8, 64, 600])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_ours_is_never_the_larger_at_small_t_without_noise(
    steps: int, noise: float
) -> None:
    # Each with its own effective variance and batch variance, as they are used.
    variances = (
        theory.effective_variance(7, 2, 20, noise**2, noise, 8 / 3),
        theory.effective_variance_paper(7, 2, 20, noise**2, noise, 8 / 3),
    )
    for ratio in (1.0, 4.0, 100.0):
        ours, paper = (
            bound(1.0, 1 / ratio, 8 / 3, noise, variance, 1.0, steps)
            for bound, variance in zip(CONVEX, variances, strict=True)
        )
        assert ours.total <= paper.total
        assert ours.start <= paper.start


def test_bounds_as_the_paper_scales_them() -> None:
    for bound in CONVEX:
        # Late: four times the steps, T' being T.
        early, late = (bound(2, 0.5, 0.5, 1, 1, 5, T) for T in (10**8, 4 * 10**8))
        assert late.noise == pytest.approx(early.noise / 4, rel=1e-4)
        assert bound(2, 0.5, 0.5, 10, 100, 5, 9).noise == pytest.approx(
            100 * bound(2, 0.5, 0.5, 1, 1, 5, 9).noise
        )
        # T to infinity leaves what adversaries gain from heterogeneity; f = 0 nothing.
        last = bound(2, 0.5, 0.5, 1, 1, 5, 10**18)
        assert last.total == pytest.approx(last.heterogeneity, rel=1e-6)
        assert bound(2, 0.5, 0.0, 9, 1, 5, 1).heterogeneity == 0


@pytest.mark.parametrize("bound", OTHER)
def test_without_convexity_as_the_paper_scales_it(
    bound: Callable[..., theory.Bound],
) -> None:
    early, late = (bound(2.0, 0.5, 1.0, 1.0, 5.0, T) for T in (10**6, 4 * 10**6))
    assert late.noise == pytest.approx(early.noise / 2, rel=1e-5)
    assert late.start == pytest.approx(early.start / 4)
    last = bound(2.0, 0.5, 1.0, 1.0, 5.0, 10**18)
    assert last.total == pytest.approx(last.heterogeneity, rel=1e-6)
    assert bound(2.0, 0.0, 9.0, 1.0, 5.0, 1).heterogeneity == 0


def test_the_papers_bound_at_the_start_is_what_its_proof_has() -> None:
    # T' = a1 L/mu + T: the gap itself at T = 0, where the printed T makes it infinite.
    bound = theory.strongly_convex_bound_paper(1.0, 0.25, 0.0, 0.0, 0.0, 3.0, 1)
    assert bound.start == pytest.approx(3.0, rel=0.01)


class Worst:
    """A quadratic loss, and adversaries who use all that kappa allows in every step.

    L = sum_j c_j theta_j^2/2 with c from mu to 1; honest clients differ by a constant
    along the flat direction, so that Gcov is the same for all models.
    """

    mu, h, d, gap = 0.25, 4, 20, 1.0

    def __init__(self, kappa: float, noise: float, spread: float) -> None:
        self.kappa, self.noise, self.spread = kappa, noise, spread
        self.curvatures = np.linspace(self.mu, 1.0, self.d)
        self.offsets = np.zeros((self.h, self.d))
        self.offsets[:, 0] = spread * np.array([1, -1, 1, -1])

    def run(
        self, rates: list[float], betas: list[float], seed: int
    ) -> tuple[float, float]:
        """Return L(theta_T) - L*, and the mean of ||grad L||^2 over the iterates."""
        rng = np.random.default_rng(seed)
        theta, momentums = np.zeros(self.d), np.zeros((self.h, self.d))
        theta[0] = np.sqrt(2 * self.gap / self.mu)
        squares = []
        for rate, beta in zip(rates, betas, strict=True):
            gradient = self.curvatures * theta
            squares.append(gradient @ gradient)
            drawn = gradient + self.offsets + self.noise * rng.normal(size=(self.h, 20))
            momentums = beta * momentums + (1 - beta) * drawn
            top = theory.heterogeneity(momentums)[1]
            against = -gradient / np.linalg.norm(gradient)
            aggregate = momentums.mean(axis=0) + np.sqrt(self.kappa) * top * against
            theta = theta - rate * aggregate
        return float(self.curvatures @ theta**2) / 2, float(np.mean(squares))

    @property
    def variance(self) -> float:
        return theory.effective_variance(4, 0, 20, 0.0, self.noise, self.kappa)


def test_the_run_is_the_papers_shifted_by_one_step_at_constant_rates() -> None:
    """The paper starts from m_0 = 0; its schedule then is one step late as well."""

    def run(
        rates: Callable[[int], float], betas: Callable[[int], float], late: int
    ) -> np.ndarray:
        """Return theta after 64 momentums of the gradient; `late` is 1 in the paper."""
        theta, momentum = np.array([0.1, -0.2]), np.zeros(2)
        for step in range(late, 64 + late):
            beta = betas(max(step - 1, 0))
            momentum = beta * momentum + (1 - beta) * np.array([0.25, 1.0]) * theta
            theta = theta - rates(step) * momentum
        return theta

    constant = (lambda t: 0.03, lambda t: 0.28)
    np.testing.assert_array_equal(run(*constant, 0), run(*constant, 1))
    schedule = theory.StronglyConvex(1.0, 0.25)
    given = (schedule.learning_rate, schedule.momentum)
    ours, paper = (run(*given, late) for late in (0, 1))
    apart = np.linalg.norm(ours - paper)
    # By 2e-5 of 0.09, in docs/convergence.md: not the same, and hardly apart.
    assert 1e-6 < apart < 1e-3 * np.linalg.norm(paper)


@pytest.mark.parametrize(("kappa", "noise"), [(0.0, 0.0), (1.0, 0.1), (12.0, 0.3)])
def test_each_step_keeps_to_the_descent_and_the_deviation_lemma(
    kappa: float, noise: float
) -> None:
    """Descent holds surely; the deviation's recursion on average over the noise."""
    problem, smooth, rate = Worst(kappa, noise, 0.0), 1.0, 1 / 30
    beta = 1 - 24 * smooth * rate
    rng = np.random.default_rng(3)
    theta = rng.normal(size=(4000, 1, problem.d)) * np.ones((1, problem.h, 1))
    theta[:] = theta[:1]  # one model, many draws of the noise
    momentums = np.zeros_like(theta)

    def loss(models: np.ndarray) -> np.ndarray:
        return np.asarray((problem.curvatures * models[:, 0] ** 2).sum(axis=1) / 2)

    deviation = moved = np.zeros(len(theta))
    for step in range(12):
        gradient = problem.curvatures * theta
        drawn = gradient + noise * rng.normal(size=theta.shape)
        momentums = beta * momentums + (1 - beta) * drawn
        mean = momentums.mean(axis=1, keepdims=True)
        now = np.square(mean - gradient[:, :1]).sum(axis=(1, 2))
        if step:
            variance = (1 - beta) ** 2 * problem.d * noise**2 / problem.h
            moved_most = beta**2 / (1 - beta) * (smooth * rate) ** 2 * moved.mean()
            most = beta * deviation.mean() + moved_most + variance
            assert now.mean() <= most + 4 * now.std() / len(now) ** 0.5
        deviation = now
        tops = np.linalg.norm(momentums - mean, ord=2, axis=(1, 2)) / problem.h**0.5
        unit = gradient[:, :1] / np.linalg.norm(gradient[:, :1], axis=2, keepdims=True)
        output = mean - (kappa**0.5 * tops)[:, None, None] * unit
        before, theta = theta, theta - rate * output
        moved = np.square(output).sum(axis=(1, 2))
        length = np.square(gradient[:, 0]).sum(axis=1)
        off = np.square(output - gradient[:, :1]).sum(axis=(1, 2))
        descent = length + (1 - smooth * rate) * moved - off
        assert (loss(theta) <= loss(before) - rate / 2 * descent + 1e-12).all()


CASES = [(0.0, 0.1, 0.0), (1.0, 0.1, 0.0), (12.0, 0.1, 0.1), (12.0, 0.0, 0.1)]


@pytest.mark.parametrize(("kappa", "noise", "spread"), CASES)
@pytest.mark.parametrize("steps", [64, 600])
def test_no_adversary_beats_the_strongly_convex_bound(
    kappa: float, noise: float, spread: float, steps: int
) -> None:
    problem = Worst(kappa, noise, spread)
    schedule = theory.StronglyConvex(1.0, problem.mu)
    rates = [schedule.learning_rate(t) for t in range(steps)]
    betas = [schedule.momentum(max(t - 1, 0)) for t in range(steps)]
    found = np.mean([problem.run(rates, betas, seed)[0] for seed in range(8)])
    bound = theory.strongly_convex_bound(
        1.0, problem.mu, kappa, spread, problem.variance, problem.gap, steps
    )
    assert found <= bound.total
    # Within a factor of 50 where adversaries act: the constants are no decoration.
    assert kappa == 0.0 or bound.total <= 50 * found


@pytest.mark.parametrize(("kappa", "noise", "spread"), CASES)
@pytest.mark.parametrize("steps", [1, 8, 400])
def test_no_adversary_beats_the_non_convex_bound(
    kappa: float, noise: float, spread: float, steps: int
) -> None:
    problem = Worst(kappa, noise, spread)
    std = float(np.sqrt(problem.variance))
    schedule = theory.NonConvex(1.0, problem.gap, std, steps)
    rates, betas = [schedule.learning_rate] * steps, [schedule.momentum] * steps
    found = np.mean([problem.run(rates, betas, seed)[1] for seed in range(8)])
    bound = theory.non_convex_bound(
        1.0, kappa, spread, problem.variance, problem.gap, steps
    )
    assert found <= bound.total
