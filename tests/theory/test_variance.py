"""Variances of batches and momentums: by hand, by enumeration and by simulation."""

from itertools import combinations

import numpy as np
import pytest

from flwr_safedshb import theory
from simulations.studies.drift import CROSS, draw_drifts

# By hand: n = 5, f = 1, d = 8, b = 4, m = 8, sigma = 2, sigma_DP = 1/2, kappa = 1/2.


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
