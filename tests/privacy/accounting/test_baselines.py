"""Other accountants' figures, reproduced and labelled (T = 400, b = 25, delta 1e-4)."""

import math

import pytest

from flwr_safedshb.privacy.accounting.baselines import (
    figures,
    opacus,
    paper_theorem,
    rdp,
)
from flwr_safedshb.privacy.plan import PrivacyPlan

DELTA = 1e-4


def make(s: float, m: int = 2763) -> PrivacyPlan:
    return PrivacyPlan(1.0, s, 25, m)


# Each computed beforehand with m = 2763 = 11055 // 4.
@pytest.mark.parametrize(("s", "value"), [(1, 2.166), (2, 0.934), (3, 0.659)])
def test_the_papers_theorem_gives_its_golden_figures(s: float, value: float) -> None:
    assert paper_theorem(make(s), 400, DELTA).epsilon == pytest.approx(value, abs=5e-4)


@pytest.mark.parametrize(("s", "value"), [(1, 1.736), (2, 0.674), (3, 0.409)])
def test_dp_accountings_rdp_gives_its_golden_figures(s: float, value: float) -> None:
    assert rdp(make(s), 400, DELTA).epsilon == pytest.approx(value, abs=5e-4)


# The paper prints 1.14, 0.32 and 0.19 for its three regimes.
@pytest.mark.parametrize(
    ("s", "value", "printed"), [(1, 1.1419, 1.14), (2, 0.3164, 0.32), (3, 0.1896, 0.19)]
)
@pytest.mark.filterwarnings("ignore")
def test_opacus_gives_the_figures_that_the_paper_prints(
    s: float, value: float, printed: float
) -> None:
    found = opacus(make(s), 400, DELTA).epsilon
    assert found == pytest.approx(value, abs=5e-5)
    assert round(found, 2) == printed


def literal_theorem(s: float, rate: float, steps: int, delta: float) -> float:
    """Evaluate the theorem as it is printed, over real orders, in plain arithmetic."""

    def gaussian(a: float) -> float:  # eps(a), with sigma_DP = s (2C/b)
        return a / (2 * s**2)

    def sampled(a: int) -> float:  # eps'(a)
        second = min(4 * (math.exp(gaussian(2)) - 1), 2 * math.exp(gaussian(2)))
        total = 1 + rate**2 * math.comb(a, 2) * second
        for j in range(3, a + 1):
            growth = math.exp((j - 1) * gaussian(j))
            total += 2 * rate**j * math.comb(a, j) * growth
        return math.log(total) / (a - 1)

    def one_step(a: float) -> float:  # eps_1(a)
        low, high = math.floor(a), math.ceil(a)
        value = (a - low) * (high - 1) / (a - 1) * sampled(high) if high > low else 0.0
        if low > 1:
            value += (1 - a + low) * (low - 1) / (a - 1) * sampled(low)
        return value

    orders = [1 + k / 8 for k in range(1, 8 * 20)]
    return min(
        steps * one_step(a) + math.log(1 / delta) / (a - 1) for a in orders if a > 1
    )


@pytest.mark.parametrize(("s", "m"), [(1.0, 2763), (1.0, 500), (1.5, 2763)])
def test_paper_theorem_equals_its_literal_form(s: float, m: int) -> None:
    literal = literal_theorem(s, 25 / m, 400, DELTA)
    assert paper_theorem(make(s, m), 400, DELTA).epsilon == pytest.approx(literal)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("shipped_samplers")
def test_figures_put_the_plans_own_first_and_label_all() -> None:
    plan = PrivacyPlan(1.0, 2.0, 25, 2763, sampling="poisson")
    found = figures(plan, 400, DELTA)
    assert found[0] == plan.statement(400, DELTA)
    assert len({str(figure) for figure in found}) == 6
    labels = [(f.sampler.split()[0], f.adjacency, f.accountant) for f in found]
    assert labels == [
        ("Poisson", "replace-one", "PLD accountant"),
        ("fixed-size", "replace-one", "PLD accountant"),
        ("Poisson", "add-remove", "PLD accountant"),
        ("fixed-size", "replace-one", "RDP accountant of dp_accounting"),
        ("fixed-size", "replace-one", "theorem of Allouah et al. 2023"),
        (
            "Poisson",
            "add-remove",
            "RDP accountant of Opacus, at half the plan's noise",
        ),
    ]


def test_comparisons_without_meaning_are_refused() -> None:
    with pytest.raises(ValueError, match="sampling='poisson'"):
        paper_theorem(PrivacyPlan(1.0, 1.0, 25, 100, sampling="poisson"), 1, DELTA)
    for compare in (paper_theorem, rdp, opacus):
        with pytest.raises(ValueError, match="noise_multiplier=0"):
            compare(make(0.0), 1, DELTA)
        with pytest.raises(ValueError, match="delta=0"):
            compare(make(1.0), 1, 0.0)
