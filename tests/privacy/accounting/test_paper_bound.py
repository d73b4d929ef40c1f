"""The paper's exact theorem: every term of its sums, and an infimum that is not cut."""

import math

import numpy as np
import pytest
from scipy.special import gammaln, logsumexp

from flwr_safedshb.privacy.accounting import paper_bound


def add_terms(order: int, s: float, rate: float) -> float:
    """eps'(a), by binomial coefficients."""
    j = np.arange(3.0, order + 1)
    terms = gammaln(order + 1) - gammaln(j + 1) - gammaln(order - j + 1)
    terms += j * math.log(rate) + (j - 1) * j / (2 * s**2)
    small = math.exp(s**-2)
    second = rate**2 * math.comb(order, 2) * min(4 * (small - 1), 2 * small)
    logs = [0.0, math.log(second), *(math.log(2) + terms)]
    return float(logsumexp(logs)) / (order - 1)


@pytest.mark.parametrize(
    ("s", "rate"),
    [(1.0, 0.01), (20.0, 2.5e-4), (5.0, 0.1), (100.0, 1e-4), (50.0, 0.01)],
)
@pytest.mark.parametrize("order", [2, 3, 10, 1000, 60_000])
def test_the_divergence_is_that_of_the_theorem(
    s: float, rate: float, order: int
) -> None:
    found = paper_bound.compute_divergence(order, s, rate)
    assert found == pytest.approx(add_terms(order, s, rate), rel=1e-8)


def test_the_infimum_is_not_cut_at_1024() -> None:
    # s = 20, b = 25, m = 1e5, T = 1: 5.7 times smaller than with orders up to 1024.
    def compute_objective(order: int) -> float:
        return add_terms(order, 20.0, 2.5e-4) + math.log(1e4) / (order - 1)

    found = paper_bound.minimize_epsilon(20.0, 2.5e-4, 1, 1e-4)
    cut = min(map(compute_objective, (1023, 1024)))
    assert cut / found == pytest.approx(5.72, abs=0.01)
    assert found <= min(map(compute_objective, range(2, 12_000, 97)))


@pytest.mark.parametrize("rate", [2.5e-4, 1e-9])
def test_a_very_small_rate_still_has_an_epsilon_above_0(rate: float) -> None:
    found = paper_bound.minimize_epsilon(1e3, rate, 1, 1e-4)
    assert 0.0 < found < max(2 * math.log(1e4) * rate, 1e-4)


@pytest.mark.parametrize(("s", "rate", "steps"), [(1.0, 0.009, 400), (4.0, 0.05, 30)])
def test_the_search_finds_the_best_integer(s: float, rate: float, steps: int) -> None:
    best = min(
        steps * add_terms(a, s, rate) + math.log(1e5) / (a - 1) for a in range(2, 600)
    )
    found = paper_bound.minimize_epsilon(s, rate, steps, 1e-5)
    assert found == pytest.approx(best, rel=1e-9)
