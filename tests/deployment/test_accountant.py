"""Our accountant behind Flower's protocol, against Flower's own backend."""

import json
from typing import Any

import pytest
from flwr.serverapp import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    PrivacyAccountant,
    PrivacyConfig,
    RdpAccountant,
    SamplingMethod,
)
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)

from flwr_safedshb import PLDAccountant

MODELS = {
    SamplingMethod.POISSON: NeighboringRelation.ADD_OR_REMOVE_ONE,
    SamplingMethod.WITHOUT_REPLACEMENT: NeighboringRelation.REPLACE_ONE,
    SamplingMethod.NO_AMPLIFICATION: NeighboringRelation.ADD_OR_REMOVE_ONE,
}
EVENT = GaussianPrivacyEvent(noise_multiplier=1.2, sample_size=20, population_size=200)


def config(method: SamplingMethod, **more: Any) -> PrivacyConfig:
    return PrivacyConfig(1e-5, 200, MODELS[method], method, **more)


@pytest.mark.parametrize("method", MODELS)
def test_it_is_a_little_tighter_than_renyi(method: SamplingMethod) -> None:
    ours: PrivacyAccountant = PLDAccountant(config(method))
    theirs = RdpAccountant(config(method))
    for each in (ours, theirs):
        each.compose(EVENT, 30)
    spent, bound = ours.get_privacy_spent(), theirs.get_privacy_spent()
    assert 0.5 * bound.epsilon < spent.epsilon < bound.epsilon
    assert (spent.num_releases, spent.delta) == (30, 1e-5)
    delta = ours.get_delta(spent.epsilon)
    assert 1e-5 * 0.99 < delta < 1e-5 * 1.01


def test_a_gaussian_release_costs_what_its_closed_form_says() -> None:
    from scipy.optimize import brentq
    from scipy.stats import norm

    def excess(epsilon: float) -> float:
        shift = 1.0 / 1.2
        first = norm.cdf(shift / 2 - epsilon / shift)
        second = norm.cdf(-shift / 2 - epsilon / shift)
        return float(first - 2.718281828459045**epsilon * second - 1e-5)

    ours = PLDAccountant(config(SamplingMethod.NO_AMPLIFICATION))
    ours.compose(EVENT)
    assert ours.get_epsilon(1e-5) == pytest.approx(brentq(excess, 0, 20), rel=0.01)


def test_limits_and_states() -> None:
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


def test_flowers_strategy_takes_it() -> None:
    ours = PLDAccountant(config(SamplingMethod.NO_AMPLIFICATION, max_epsilon=9.0))
    strategy = DifferentialPrivacyServerSideFixedClipping(
        FedAvg(), 1.0, 1.0, 20, accountant=ours
    )
    assert strategy.accountant is ours
