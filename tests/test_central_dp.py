"""Our accountant behind Flower's protocol, against integrals over noisy sums."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.serverapp import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    PrivacyConfig,
    SamplingMethod,
)
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)
from numpy.typing import NDArray
from scipy.stats import norm

from flwr_safedshb import PLDAccountant

Floats = NDArray[np.float64]
Density = Callable[[Floats], Floats]

MODELS = {
    SamplingMethod.POISSON: NeighboringRelation.ADD_OR_REMOVE_ONE,
    SamplingMethod.WITHOUT_REPLACEMENT: NeighboringRelation.REPLACE_ONE,
    SamplingMethod.NO_AMPLIFICATION: NeighboringRelation.ADD_OR_REMOVE_ONE,
}
EVENT = GaussianPrivacyEvent(noise_multiplier=1.2, sample_size=20, population_size=200)


def config(method: SamplingMethod, **more: Any) -> PrivacyConfig:
    return PrivacyConfig(1e-5, 200, MODELS[method], method, **more)


def divergence(top: Density, bottom: Density, epsilon: float) -> float:
    """Return the hockey-stick divergence, by the trapezoidal rule."""
    x = np.linspace(-60.0, 60.0, 600_001)
    gain = np.maximum(top(x) - math.exp(epsilon) * bottom(x), 0.0)
    return float(np.trapezoid(gain, x))


def sums(chosen: float, others: float, rate: float, noise: float) -> Density:
    """Return the density of a noisy sum of clipped updates, in units of C.

    Parameters
    ----------
    chosen, others : float
        The sum if the client is drawn, and if it is not.
    """

    def density(x: Floats) -> Floats:
        drawn, left = (norm.pdf(x, mean, noise) for mean in (chosen, others))
        found: Floats = rate * drawn + (1.0 - rate) * left
        return found

    return density


def neighbours(method: SamplingMethod, noise: float) -> tuple[Density, Density]:
    """Return what is released of two neighbouring populations of 100 clients.

    Ten are drawn, and every update is clipped to 1. Without replacement all clients
    send -1, and one sends +1 in its place: the sum is -8 instead of -10 if it is drawn.
    The same where a fixed number replies. Where a client is added to silent ones, the
    sum is 1 instead of 0.
    """
    if method is SamplingMethod.POISSON:
        return sums(1.0, 0.0, 0.1, noise), sums(0.0, 0.0, 0.1, noise)
    rate = 0.1 if method is SamplingMethod.WITHOUT_REPLACEMENT else 1.0
    return sums(-8.0, -10.0, rate, noise), sums(-10.0, -10.0, rate, noise)


@pytest.mark.parametrize("noise", [0.6, 1.0, 3.0])
@pytest.mark.parametrize("method", MODELS)
def test_a_release_costs_what_an_integral_over_the_noisy_sums_says(
    method: SamplingMethod, noise: float
) -> None:
    ours = PLDAccountant(PrivacyConfig(1e-5, 100, MODELS[method], method))
    ours.compose(GaussianPrivacyEvent(noise, 10, 100))
    found = ours.get_epsilon(1e-5)
    one, other = neighbours(method, noise)
    reached = max(divergence(one, other, found), divergence(other, one, found))
    assert 0.97e-5 < reached <= 1e-5 * (1 + 1e-9)


def test_ten_of_a_hundred_clients_without_replacement() -> None:
    """By the integral: 6.5755. With noise in units of 2C it would be 1.6846."""
    method = SamplingMethod.WITHOUT_REPLACEMENT
    ours = PLDAccountant(PrivacyConfig(1e-5, 100, MODELS[method], method))
    ours.compose(GaussianPrivacyEvent(1.0, 10, 100))
    assert ours.get_epsilon(1e-5) == pytest.approx(6.5755, abs=0.01)


def test_thirty_releases_cost_more_than_one_and_less_than_thirty() -> None:
    ours = PLDAccountant(config(SamplingMethod.POISSON))
    ours.compose(EVENT)
    one = ours.get_epsilon(1e-5)
    ours.compose(EVENT, 29)
    spent = ours.get_privacy_spent()
    assert one < spent.epsilon < 30 * one
    assert (spent.num_releases, spent.delta) == (30, 1e-5)
    assert 1e-5 * 0.99 < ours.get_delta(spent.epsilon) < 1e-5 * 1.01


def test_limits_are_kept_and_states_restored() -> None:
    method = SamplingMethod.POISSON
    ours = PLDAccountant(config(method, max_epsilon=2.0))
    assert ours.get_epsilon(1e-5) == ours.get_delta(1.0) == 0.0
    assert not ours.would_exceed(EVENT)
    assert ours.would_exceed(EVENT, count=1000)
    ours.compose(EVENT, 5)
    assert ours.num_releases == 5
    again = PLDAccountant(config(method, max_epsilon=2.0))
    again.load_state_dict(json.loads(json.dumps(ours.state_dict())))
    assert again.get_privacy_spent() == ours.get_privacy_spent()
    with pytest.raises(ValueError, match="the state is of backend"):
        PLDAccountant(config(method)).load_state_dict(ours.state_dict())
    with pytest.raises(ValueError, match="population_size=100"):
        ours.compose(GaussianPrivacyEvent(1.0, 10, 100))


def test_flowers_strategy_takes_the_accountant() -> None:
    ours = PLDAccountant(config(SamplingMethod.NO_AMPLIFICATION, max_epsilon=9.0))
    strategy = DifferentialPrivacyServerSideFixedClipping(
        FedAvg(), 1.0, 1.0, 20, accountant=ours
    )
    assert strategy.accountant is ours
