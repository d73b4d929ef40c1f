"""The paper's exact theorem: sums bounded where they are long, an infimum not cut."""

import math

import numpy as np
import pytest
from scipy.special import gammaln, logsumexp

from flwr_safedshb.privacy.accounting import paper_bound


def added_up(order: int, s: float, rate: float) -> float:
    """eps'(a), every term of it."""
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
@pytest.mark.parametrize("order", [2, 3, 10, 1000, 16_384, 16_385, 60_000])
def test_long_sums_are_bounded_and_short_ones_exact(
    s: float, rate: float, order: int
) -> None:
    found, exact = (
        paper_bound.bound_divergence(order, s, rate),
        added_up(order, s, rate),
    )
    if order <= 16_384:
        assert found == pytest.approx(exact, rel=1e-9)
    else:
        # Never below, and near where the order is of any use.
        assert found >= exact * (1 - 1e-9)
        assert found <= exact * (1 + 1e-6) or exact > 5.0


def test_the_infimum_is_not_cut_at_1024() -> None:
    # s = 20, b = 25, m = 1e5, T = 1: 5.7 times smaller than with orders up to 1024.
    cut = min(added_up(a, 20.0, 2.5e-4) + math.log(1e4) / (a - 1) for a in (1023, 1024))
    found = paper_bound.minimize_epsilon(20.0, 2.5e-4, 1, 1e-4)
    assert cut / found == pytest.approx(5.72, abs=0.01)
    # And nothing of what it looked past is smaller.
    orders = range(2, 12_000, 97)
    assert found <= min(
        added_up(a, 20.0, 2.5e-4) + math.log(1e4) / (a - 1) for a in orders
    )


def test_the_best_order_may_be_in_the_millions() -> None:
    for s, rate in ((1e3, 2.5e-4), (1e6, 1e-9)):
        found = paper_bound.minimize_epsilon(s, rate, 1, 1e-4)
        # Some 2/r: far beyond what could be added up, and still an epsilon above 0.
        assert 0.0 < found < 2 * math.log(1e4) * rate


@pytest.mark.parametrize(("s", "rate", "steps"), [(1.0, 0.009, 400), (4.0, 0.05, 30)])
def test_the_search_finds_the_best_integer(s: float, rate: float, steps: int) -> None:
    best = min(
        steps * added_up(a, s, rate) + math.log(1e5) / (a - 1) for a in range(2, 600)
    )
    assert paper_bound.minimize_epsilon(s, rate, steps, 1e-5) == pytest.approx(
        best, rel=1e-9
    )
