"""The Renyi filter: its moments against integrals, its weights, and what it costs."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import norm

from flwr_safedshb.privacy.accounting import accountant, pld
from flwr_safedshb.privacy.accounting.privacy_loss import ORDERS
from flwr_safedshb.privacy.accounting.renyi_filter import RenyiFilter
from flwr_safedshb.privacy.plan import PrivacyPlan

DELTA = 1e-5
Density = Callable[[NDArray[np.float64]], NDArray[np.float64]]
POSITIVE = ORDERS[ORDERS > 0]


def mixed(rate: float, mean: float, std: float) -> Density:
    """Return the log density of (1-q) N(0, s^2) + q N(mean, s^2)."""

    def density(x: NDArray[np.float64]) -> NDArray[np.float64]:
        parts = [norm.logpdf(x, 0.0, std) + math.log1p(-rate)] if rate < 1 else []
        parts.append(norm.logpdf(x, mean, std) + math.log(rate))
        found: NDArray[np.float64] = np.logaddexp.reduce(parts)
        return found

    return density


X = np.linspace(-60.0, 60.0, 400_001)
# A loss that is as rare is left out of the moments, and delta pays for it.
RARE = 2.0**-63


def pieces(
    top: Density, bottom: Density
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return losses and their log masses under the first, without the rarest."""
    spacing = math.log(X[1] - X[0])
    loss, mass = top(X) - bottom(X), top(X) + spacing
    order = np.argsort(-loss)
    kept = np.sort(order[np.cumsum(np.exp(mass[order])) > RARE])
    return loss[kept], mass[kept]


def moment(loss: NDArray[np.float64], mass: NDArray[np.float64], order: float) -> float:
    """Return log E[e^(r L)], by the trapezoidal rule."""
    return float(np.logaddexp.reduce(mass + order * loss))


PAIRS = {
    "fixed": [(1.0, 0.0), (0.0, 1.0)],
    "whole": [(1.0, 0.0), (0.0, 1.0)],
    # In units of C/b: twice the noise, and the example goes from one side to the other.
    "poisson": [(1.0, -1.0), (1.0, -1.0)],
}


@pytest.mark.parametrize("order", [0.25, 1.0, 4.0, 16.0])
@pytest.mark.parametrize(("noise", "rate"), [(1.0, 0.05), (0.6, 0.3), (4.0, 0.01)])
@pytest.mark.parametrize("sampling", PAIRS)
def test_moments_of_a_step_are_at_least_those_of_either_order_of_the_datasets(
    sampling: str, noise: float, rate: float, order: float
) -> None:
    rate = 1.0 if sampling == "whole" else rate
    batch = round(1000 * rate)
    plan = PrivacyPlan(1.0, noise, batch, 1000, sampling)
    (profile,) = plan.sampler.dominating_pairs(plan)
    moments, _ = pld.compute_filter_moments([(profile, 1)], DELTA)
    found = float(moments[int(np.argmin(np.abs(POSITIVE - order)))])
    std = 2 * noise if sampling == "poisson" else noise
    both = [
        pieces(*(mixed(rate, m, std) if m else mixed(1.0, 0.0, std) for m in pair))
        for pair in PAIRS[sampling]
    ]
    exact = max(moment(loss, mass, order) for loss, mass in both)
    assert exact * (1 - 1e-6) - 1e-12 <= found
    # It is that of the profile: large losses of one order, small ones of the other.
    (up, up_mass), (down, down_mass) = both
    large, small = up > 0, down < 0
    rest = 1 - np.exp(up_mass[large]).sum() - np.exp(down_mass[small]).sum()
    losses = np.concatenate([up[large], down[small], np.zeros(1)])
    same = np.array([math.log(max(rest, 1e-300))])
    masses = np.concatenate([up_mass[large], down_mass[small], same])
    profiled = moment(losses, masses, order)
    assert found <= 1.02 * profiled + 1e-9


@pytest.mark.parametrize("limit", [1e-3, 1.0, 8.0, 1e6])
def test_weights_are_fixed_by_what_is_known_beforehand(limit: float) -> None:
    plan = PrivacyPlan(1.0, 1.0, 25, 2763)
    renyi = RenyiFilter(((plan, 1),), DELTA, limit, "replace-one")
    weights = np.exp(renyi.log_weights)
    assert weights.sum() == pytest.approx(1.0)
    assert weights.max() == pytest.approx(0.5)
    assert weights.min() > 0.0


def test_a_first_release_without_noise_has_weights_and_costs_everything() -> None:
    silent = PrivacyPlan(1.0, 0.0, 25, 2763)
    renyi = RenyiFilter(((silent, 1),), DELTA, 1.0, "replace-one")
    assert renyi.epsilon([(silent, 1)]) == math.inf
    assert np.exp(renyi.log_weights).sum() == pytest.approx(1.0)
    assert renyi.epsilon([]) == 0.0


@pytest.mark.parametrize("steps", [1, 400, 10**6])
@pytest.mark.parametrize("noise", [1e-6, 0.3, 1.0, 30.0, 1e6])
@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_a_filter_never_says_less_than_what_was_fixed_beforehand(
    sampling: str, noise: float, steps: int
) -> None:
    plan = PrivacyPlan(1.0, noise, 25, 2763, sampling)
    renyi = RenyiFilter(((plan, 1),), DELTA, 2.0, "replace-one")
    assert renyi.epsilon([(plan, steps)]) >= accountant.compute_epsilon(
        [(plan, steps)], DELTA, "replace-one"
    )


def test_more_steps_than_can_be_accounted_for_cost_everything() -> None:
    plan = PrivacyPlan(1.0, 1e6, 1, 10**12)
    renyi = RenyiFilter(((plan, 1),), DELTA, 2.0, "replace-one")
    half = [(plan, 6 * 10**8)]
    assert renyi.epsilon(half) < math.inf
    assert renyi.epsilon([*half, (PrivacyPlan(1.0, 1e5, 1, 10**12), 6 * 10**8)]) == (
        math.inf
    )
