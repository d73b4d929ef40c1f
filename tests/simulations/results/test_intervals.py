"""Intervals over few runs: they cover what they state, whatever the number of runs."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from simulations.results.intervals import estimate, estimate_means, slope

Floats = NDArray[np.float64]
VALUES = [1.0, 2.0, 4.0, 8.0]
TRIALS = 1000


def test_of_a_mean_it_is_the_t_interval() -> None:
    runs = np.random.default_rng(1).normal(size=(7, 2))
    for column, found in zip(runs.T, estimate_means(runs), strict=True):
        error = stats.sem(column)
        expected = stats.t.interval(0.95, 6, loc=column.mean(), scale=error)
        assert found["value"] == pytest.approx(column.mean())
        assert (found["low"], found["high"]) == pytest.approx(expected)


def test_slopes_of_what_is_known() -> None:
    exact = np.array([[3 * v**-2 for v in VALUES]] * 5)
    found = slope(VALUES, exact, 0.0)
    assert found["value"] == pytest.approx(-2)
    assert found["high"] - found["low"] < 1e-9
    # The first value lies off the line, and is left out.
    bent = np.array([[9.0, *VALUES[1:]]] * 5)
    assert slope(VALUES, bent, 2.0)["value"] == pytest.approx(1)


def percentiles(runs: Floats, rng: np.random.Generator) -> tuple[float, float]:
    """Return the interval of a percentile bootstrap of the slope."""
    picks = rng.integers(len(runs), size=(500, len(runs)))
    x = np.log(VALUES)
    weights = (x - x.mean()) / np.square(x - x.mean()).sum()
    slopes = np.log(runs[picks].mean(axis=1)) @ weights
    low, high = np.quantile(slopes, [0.025, 0.975])
    return float(low), float(high)


@pytest.mark.parametrize("num_runs", [6, 8])
def test_intervals_of_slopes_cover_what_they_state(num_runs: int) -> None:
    """Errors of one run share a factor of the steepness, as those of a training do."""
    rng = np.random.default_rng(num_runs)
    held = bootstrap = 0
    for _ in range(TRIALS):
        noise = rng.gamma(30.0, 1 / 30, size=(num_runs, 4))
        steeper = np.array(VALUES) ** (0.05 * rng.normal(size=(num_runs, 1)))
        true = 1 + 0.00125 * np.log(VALUES) ** 2 @ weights()
        runs = np.array(VALUES) * noise * steeper
        found = slope(VALUES, runs, 0.0)
        held += bool(found["low"] <= true <= found["high"])
        low, high = percentiles(runs, rng)
        bootstrap += bool(low <= true <= high)
    # Four deviations of a share of 0.95 over the trials are 0.028.
    assert held / TRIALS > 0.922
    # What this test is to catch.
    assert bootstrap / TRIALS < 0.915


def weights() -> Floats:
    x = np.log(VALUES)
    return np.asarray((x - x.mean()) / np.square(x - x.mean()).sum())


def test_ratios_of_paired_runs_are_as_sure_as_their_difference() -> None:
    # Both are large or small together: a ratio of 2 is nearly exact.
    common = np.random.default_rng(2).gamma(2.0, size=6)
    paired = np.stack((2 * common, common), axis=1)
    found = estimate(paired, lambda means: means[0] / means[1])
    assert found["value"] == pytest.approx(2)
    assert found["high"] - found["low"] < 1e-9


def test_one_run_has_no_interval() -> None:
    with pytest.raises(ValueError, match="1 run has no interval"):
        estimate(np.ones((1, 2)), lambda means: means[0])
