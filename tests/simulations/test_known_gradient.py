"""What adversaries know of the loss and its optimum, from examples of their own."""

import numpy as np
import pytest

from flwr_safedshb.algorithm.model_arrays import trained_parameters
from simulations import experiment
from simulations.config import compose_config
from simulations.experiment import (
    build_untrained,
    find_goal,
    load_federation,
    make_gradient,
)
from simulations.models import loss_gradient

SETTINGS = "data=digits model=mlp num_nodes=5 num_malicious_nodes=2 attack=strongest"


def test_adversaries_with_many_examples_use_some_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = load_federation(SETTINGS).shards[:2]
    model = build_untrained(SETTINGS)
    sent = [weight.detach().numpy() for weight in trained_parameters(model).values()]
    whole = make_gradient(SETTINGS)(sent)
    everything = loss_gradient(model, held, compose_config(SETTINGS).weight_decay)
    np.testing.assert_allclose(whole, everything, rtol=1e-5, atol=1e-7)
    count = sum(len(labels) for _, labels in held)
    monkeypatch.setattr(experiment, "_KNOWN_EXAMPLES", count // 2)
    some = make_gradient(SETTINGS)(sent)
    cosine = whole @ some / np.linalg.norm(whole) / np.linalg.norm(some)
    assert 0.9 < cosine < 1.0 - 1e-6


def test_the_goal_leads_away_from_the_optimum_of_what_adversaries_hold() -> None:
    settings = "data=breast-cancer num_nodes=5 num_malicious_nodes=2 attack=target"
    goal = find_goal(settings)
    model = build_untrained(settings)
    first = [weight.detach().numpy() for weight in trained_parameters(model).values()]
    assert not any(weight.any() for weight in first)
    parts, start = [], 0
    for weight in first:
        parts.append(-goal[start : start + weight.size].reshape(weight.shape))
        start += weight.size
    gradient = make_gradient(settings)
    left = np.linalg.norm(gradient([part.astype(np.float32) for part in parts]))
    assert left < 0.01 * np.linalg.norm(gradient(first))
