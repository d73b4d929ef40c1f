"""What adversaries know of the loss, from examples of their own."""

import numpy as np
import pytest

from flwr_safedshb.algorithm.model_arrays import trained_parameters
from simulations import experiment
from simulations.config import composed
from simulations.experiment import federation, gradient_of, untrained
from simulations.models import loss_gradient

SETTINGS = "data=digits model=mlp num_nodes=5 num_malicious_nodes=2 attack=strongest"


def test_adversaries_with_many_examples_use_some_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = federation(SETTINGS).shards[:2]
    model = untrained(SETTINGS)
    sent = [weight.detach().numpy() for weight in trained_parameters(model).values()]
    whole = gradient_of(SETTINGS)(sent)
    everything = loss_gradient(model, held, composed(SETTINGS).weight_decay)
    np.testing.assert_allclose(whole, everything, rtol=1e-5, atol=1e-7)
    count = sum(len(labels) for _, labels in held)
    monkeypatch.setattr(experiment, "_KNOWN_EXAMPLES", count // 2)
    some = gradient_of(SETTINGS)(sent)
    cosine = whole @ some / np.linalg.norm(whole) / np.linalg.norm(some)
    assert 0.9 < cosine < 1.0 - 1e-6
