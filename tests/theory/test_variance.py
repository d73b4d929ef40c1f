"""Spread of honest vectors: by hand, by enumeration and by simulation."""

from itertools import combinations

import numpy as np
import pytest

from flwr_safedshb import theory
from simulations.studies.drift import CROSS, draw_drifts


def test_heterogeneity_by_hand() -> None:
    # Four points on a cross, two of them twice as far: along x 8/4, along y 2/4.
    cross = [[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, -1.0]]
    for offset in (0.0, 1e3):
        total, top = theory.heterogeneity(np.array(cross) + offset)
        assert total**2 == pytest.approx(2.5)
        assert top**2 == pytest.approx(2.0)
    assert theory.heterogeneity([[3.0, 4.0]]) == (0.0, 0.0)


def test_heterogeneity_is_that_of_the_definition() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(int(rng.integers(2, 9)), int(rng.integers(1, 9))))
        covariance = np.atleast_2d(np.cov(x.T, bias=True))
        total, top = theory.heterogeneity(x)
        assert total**2 == pytest.approx(np.trace(covariance))
        assert top**2 == pytest.approx(np.linalg.eigvalsh(covariance)[-1])
        factor = theory.spectral_factor(*x.shape)
        assert top**2 <= total**2 * (1 + 1e-12) <= factor * top**2 * (1 + 1e-9)


@pytest.mark.parametrize(("h", "d"), [(2, 5), (4, 69), (9, 3), (6, 1)])
def test_the_factor_is_attained(h: int, d: int) -> None:
    # A regular simplex differs by the same in all of its h - 1 directions; where d is
    # smaller, so do equally many pairs +-e_j.
    if d >= h - 1:
        centred = np.eye(h) - 1 / h
        basis = np.linalg.svd(centred)[0][:, : h - 1]
        points = np.zeros((h, d))
        points[:, : h - 1] = basis
    else:
        points = np.array([(1 if i % 2 else -1) * np.eye(d)[i // 2 % d] for i in
                           range(2 * d)])  # fmt: skip
        h = 2 * d
    total, top = theory.heterogeneity(points)
    assert (total / top) ** 2 == pytest.approx(theory.spectral_factor(h, d))
    assert theory.spectral_factor(h) == h - 1


@pytest.mark.parametrize(("h", "d"), [(2, 1), (2, 300), (4, 69), (16, 16), (64, 5)])
def test_noise_adds_what_is_proven_to_a_covariance(h: int, d: int) -> None:
    rng = np.random.default_rng(h)
    squares = np.square(
        [theory.heterogeneity(0.5 * rng.normal(size=(h, d))) for _ in range(400)]
    )
    trace, top = squares.mean(axis=0)
    error = squares.std(axis=0) / 20
    exact, bound = theory.noise_spread(h, d, 0.5)
    assert trace == pytest.approx(exact, abs=4 * error[0])
    # Below the bound, and by no more than (sqrt(h-1) - sqrt(d))^2 allows.
    assert top <= bound + 4 * error[1]
    if d >= 64:
        assert top >= 0.5 * bound
        # Noise does not count "once": that would be 1/4.
        assert top > 1.0
    assert theory.noise_spread(1, d, 0.5) == (0.0, 0.0)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
def test_the_noise_in_a_momentum_is_that_of_its_weights(momentum: float) -> None:
    # The sum of the squares of the weights, step by step.
    squares = 0.0
    for steps in range(1, 60):
        squares = momentum**2 * squares + (1 - momentum) ** 2
        found = theory.noise_in_momentum(3.0, momentum, steps)
        assert found == pytest.approx(3.0 * np.sqrt(squares))
    assert theory.noise_in_momentum(1.0, 0.99) ** -2 == pytest.approx(199.0)
    assert theory.noise_in_momentum(0.08, 0.0) == 0.08


@pytest.mark.parametrize(("h", "d"), [(4, 69), (16, 69), (40, 1000)])
@pytest.mark.parametrize("spread", [0.0, 6.0, 20.0])
def test_the_estimate_takes_the_noise_off(h: int, d: int, spread: float) -> None:
    # Half of the clients on either side of their mean, in one direction.
    signal = np.zeros((h, d))
    signal[:, 0] = spread * np.where(np.arange(h) % 2, 1.0, -1.0)
    found = []
    for seed in range(60):
        noisy = signal + np.random.default_rng(seed).normal(size=(h, d))
        total, top = theory.heterogeneity(noisy)
        found.append(theory.heterogeneity_estimate(total**2, top**2, h, d, 1.0))
    total, top = np.mean(np.square(found), axis=0) ** 0.5
    if spread == 0.0:
        # Noise alone: far less than the 8 or 30 that it looks like.
        assert total < 3.5
        assert top < 2.5
    else:
        assert total == pytest.approx(spread, rel=0.15)
        assert top == pytest.approx(spread, rel=0.2)
    # Without noise nothing is taken off.
    assert theory.heterogeneity_estimate(9.0, 4.0, h, d, 0.0) == (3.0, 2.0)


@pytest.mark.parametrize(
    ("vectors", "words"),
    [
        (np.zeros(3), r"shape \(3,\)"),
        (np.zeros((0, 3)), r"shape \(0, 3\)"),
        ([[np.nan]], "NaN or infinity"),
    ],
)
def test_vectors_without_a_spread_are_refused(vectors: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        theory.heterogeneity(vectors)  # type: ignore[arg-type]


def test_effective_variance_by_hand() -> None:
    # 2 (1 - 4/8) 4/4 = 1 and 4/7 of it.
    assert theory.batch_variance_paper(2.0, b=4, m=8) == pytest.approx(1.0)
    assert theory.batch_variance(2.0, b=4, m=8) == pytest.approx(4 / 7)
    # (1 + 8/4)/4 + 4/2 (1 + 36/4 (1 + 8/4)) = 3/4 + 2 * 28 = 56.75.
    paper = theory.effective_variance_paper(5, 1, 8, 1.0, 0.5, 0.5)
    assert paper == pytest.approx(56.75)
    # 3/4 + 2 (1 + (1 + sqrt 2)^2/4).
    ours = theory.effective_variance(5, 1, 8, 1.0, 0.5, 0.5)
    assert ours == pytest.approx(0.75 + 2 * (1 + (1 + 2**0.5) ** 2 / 4))


@pytest.mark.parametrize(("b", "m"), [(1, 1), (1, 4), (2, 4), (3, 4), (4, 4), (3, 7)])
def test_the_batch_variance_is_exact(b: int, m: int) -> None:
    # Over every batch there is.
    gradients = np.random.default_rng(m).normal(size=(m, 3))
    mean = gradients.mean(axis=0)
    sigma = np.sqrt(np.mean(np.sum((gradients - mean) ** 2, axis=1)))
    means = [gradients[list(rows)].mean(axis=0) for rows in combinations(range(m), b)]
    exact = np.mean(np.sum((np.array(means) - mean) ** 2, axis=1))
    assert theory.batch_variance(float(sigma), b, m) == pytest.approx(exact, abs=1e-12)
    assert theory.batch_variance_paper(float(sigma), b, m) >= exact - 1e-12


def test_the_papers_variance_is_never_the_smaller() -> None:
    for d in (1, 10, 69, 10**6):
        for n, f in ((3, 1), (7, 3), (50, 10), (1000, 0)):
            given = (n, f, d, 0.0, 1.0, 1.0)
            ours = theory.effective_variance(*given) - d / (n - f)
            paper = theory.effective_variance_paper(*given) - d / (n - f)
            assert paper >= 18 * ours * (1 - 1e-9)


def test_effective_variance_at_its_limits() -> None:
    # A full batch has no sampling variance, and nothing is left without noise.
    assert theory.batch_variance(2.0, b=8, m=8) == 0.0
    assert theory.batch_variance_paper(2.0, b=8, m=8) == 0.0
    for function in (theory.effective_variance, theory.effective_variance_paper):
        assert function(5, 1, 8, 0.0, 0.0, 3.0) == 0.0
        # kappa = 0, f = 0: the variance of a mean of n, sampling and noise.
        assert function(4, 0, 8, 1.0, 0.5, 0.0) == pytest.approx(3 / 4)
        # A variance: it grows with the square of the unit of gradients.
        one, ten = function(5, 1, 8, 1.0, 0.5, 0.5), function(5, 1, 8, 100.0, 5.0, 0.5)
        assert ten == pytest.approx(100 * one)


def test_drift_bounds_by_hand() -> None:
    # h = d = 4, sigma_b^2 = 1, sigma_DP = 1/2, Gcov = 3: chance 1 + 4/4 = 2; 18 + 8,
    # then half of that + 9 + 4 * 2/4.
    assert theory.drift_bounds([0.0, 0.5], 4, 4, 1.0, 0.5, 3.0) == pytest.approx(
        [26.0, 24.0]
    )
    with pytest.raises(ValueError, match=r"momentums holds 1\.0"):
        theory.drift_bounds([1.0], 4, 4, 1.0, 0.5, 3.0)


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.3, 2.0])
@pytest.mark.parametrize("betas", [[0.0, 0.5, 0.5, 0.9], [0.9] * 12, [0.0] * 3])
def test_drifts_stay_below_their_bounds(noise: float, betas: list[float]) -> None:
    found = draw_drifts(CROSS, betas, noise, draws=400, seed=0).mean(axis=1)
    bounds = theory.drift_bounds(betas, 8, 4, 0.0, noise, 0.5)
    assert (found <= bounds).all()
    # And not far below: a bound that is idle would hide a missing factor.
    if not any(betas):
        assert (found >= np.array(bounds) / 8).all()
