"""Several clients at once are each client alone, up to rounding."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from flwr_safedshb.privacy.clipping.gradients import (
    ClippedGradients,
    UnsupportedModelError,
)
from flwr_safedshb.privacy.datasets import ArrayExamples
from flwr_safedshb.privacy.plan import PrivacyPlan, Sampling
from flwr_safedshb.privacy.private_gradient import BatchSource, private_gradient
from flwr_safedshb.privacy.randomness.noise import SeededRandomness
from flwr_safedshb.simulation.batched import private_vectors

MODELS: dict[str, Callable[[], nn.Module]] = {
    "logistic": lambda: nn.Linear(6, 1),
    "softmax": lambda: nn.Linear(6, 3, bias=False),
    "mlp": lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
}


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets.unsqueeze(1)).square().sum(dim=1)


def examples(client: int, size: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(client)
    inputs = torch.randn(size, 6, generator=rng) * 10.0 ** (client - 3)
    return inputs, torch.randn(size, generator=rng)


def draw(client: int, sampling: Sampling = "fixed", batch_size: int = 8) -> BatchSource:
    data = ArrayExamples(*examples(client))
    plan = PrivacyPlan(0.7, 1e-6, batch_size, data.size, sampling)
    return BatchSource(data, plan, SeededRandomness(5).for_step(client, 0))


def alone(gradients: ClippedGradients, mine: BatchSource, decay: float) -> torch.Tensor:
    layers = private_gradient(
        gradients, mine.examples, mine.plan, mine.randomness, decay
    )
    return torch.cat([torch.from_numpy(layer).flatten() for layer in layers])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_together_is_each_alone(name: str, sampling: Sampling) -> None:
    torch.manual_seed(0)
    gradients = ClippedGradients(MODELS[name](), loss, 0.7)
    expected = [alone(gradients, draw(i, sampling), 0.1) for i in range(6)]
    draws = [draw(i, sampling) for i in range(6)]
    found = private_vectors(gradients, draws, 0.1)
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_groups_are_sums_of_their_own_examples(
    name: str,
) -> None:
    torch.manual_seed(1)
    gradients = ClippedGradients(MODELS[name](), loss, 0.7)
    parts = [examples(i, 5) for i in range(4)]
    expected = [gradients.flat_sum(*part) for part in parts]
    inputs, targets = (torch.cat(both) for both in zip(*parts, strict=True))
    grouped = gradients.consume_batch((inputs, targets), 4)
    torch.testing.assert_close(grouped, torch.stack(expected), rtol=1e-4, atol=1e-6)


def test_an_example_that_is_not_finite_touches_no_other() -> None:
    gradients = ClippedGradients(nn.Linear(6, 1), loss, 0.7)
    parts = [examples(i, 5) for i in range(3)]
    inputs, targets = (torch.cat(both) for both in zip(*parts, strict=True))
    clean = gradients.consume_batch((inputs, targets), 3)
    inputs[7] = torch.inf
    spoilt = gradients.consume_batch((inputs, targets), 3)
    assert torch.equal(spoilt[[0, 2]], clean[[0, 2]])
    used = torch.ones(15, dtype=torch.bool)
    used[7] = False
    assert torch.equal(spoilt, gradients.consume_batch((inputs, targets), 3, used))
    assert not torch.equal(spoilt, clean)


def test_inputs_that_do_not_fit_the_model_are_refused_whatever_they_hold() -> None:
    gradients = ClippedGradients(nn.Linear(6, 1), loss, 0.7)
    said = set()
    for value in (0.0, 77.0):
        wrong = torch.full((40, 7), value), torch.zeros(40)
        other = BatchSource(ArrayExamples(*wrong), draw(0).plan, SeededRandomness(5))
        with pytest.raises(UnsupportedModelError, match="made-up") as caught:
            private_vectors(gradients, [draw(0), other])
        said.add(str(caught.value))
    assert len(said) == 1


def test_noise_of_one_client_is_not_the_noise_of_another() -> None:
    gradients = ClippedGradients(nn.Linear(6, 1), loss, 0.7)
    data = ArrayExamples(*examples(0))
    plan = PrivacyPlan(0.7, 1.0, 8, 40)
    draws = [
        BatchSource(data, plan, SeededRandomness(5).for_step(i, 0)) for i in range(2)
    ]
    first, second = private_vectors(gradients, draws)
    assert not np.allclose(first[0], second[0])
