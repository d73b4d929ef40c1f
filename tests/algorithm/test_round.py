"""Strategy and clients together are Algorithm 1, step by step."""

from functools import lru_cache

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from flwr_safedshb.aggregation import SMEA, Average, Filter, Rule
from flwr_safedshb.app import client_app
from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.privacy.plan import PrivacyPlan, Sampling
from flwr_safedshb.privacy.randomness.noise import SeededRandomness
from flwr_safedshb.simulation.in_process import InProcessGrid
from flwr_safedshb.strategy import SafeDSHB
from tests.federation import flat

N, F, STEPS, DIMENSION, EXAMPLES = 7, 3, 50, 5, 40
DECAY = 1e-2


def data(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(client)
    inputs = rng.normal(size=(EXAMPLES, DIMENSION)).astype(np.float32)
    labels = (inputs @ np.arange(-2, 3) > 0.3 * client).astype(np.float32)
    return torch.from_numpy(inputs), torch.from_numpy(labels)


def logistic(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(
        outputs.squeeze(1), targets, reduction="none"
    )


def rate(step: int) -> float:
    return 2.0 / (1 + step / 10)


def momentum(step: int) -> float:
    return 0.9 - 0.5 / (1 + step)


def make_plan(sampling: Sampling) -> PrivacyPlan:
    return PrivacyPlan(0.7, 0.4, 8, EXAMPLES, sampling)


@lru_cache
def algorithm_1(rule: Rule, plan: PrivacyPlan) -> NDArray[np.float64]:
    """Transcribe Alg. 1 for logistic regression, in float64."""
    theta = np.zeros(DIMENSION + 1)
    momentums = np.zeros((N, DIMENSION + 1))
    for t in range(STEPS):
        beta = momentum(max(t - 1, 0))
        for i in range(N):
            inputs, labels = (part.numpy().astype(np.float64) for part in data(i))
            randomness = SeededRandomness(9).for_step(i, t)
            total = np.zeros(DIMENSION + 1)
            for j in plan.sampler.draw(plan, randomness):  # line 2
                x = np.append(inputs[j], 1.0)
                residual = 1.0 / (1.0 + np.exp(-theta @ x)) - labels[j]
                gradient = residual * x
                norm = np.linalg.norm(gradient)
                total += gradient * min(1.0, plan.clip_norm / norm)
            noise = randomness.gaussian(DIMENSION + 1, plan.noise_std)
            private = total / plan.batch_size + noise + DECAY * theta  # line 3
            momentums[i] = beta * momentums[i] + (1.0 - beta) * private  # line 4
        theta = theta - rate(t) * np.asarray(rule(momentums, F))  # lines 5 and 6
    return theta


def train(rule: Rule, plan: PrivacyPlan, numpy_client: bool) -> NDArray[np.float64]:
    model = torch.nn.Linear(DIMENSION, 1)

    def client_fn(context: Context) -> SafeDSHBClient:
        return SafeDSHBClient(
            model,
            logistic,
            data(int(context.node_config["partition-id"])),
            plan,
            context,
            weight_decay=DECAY,
            randomness=SeededRandomness(9),
        )

    app = client_app(client_fn)
    keys = {}
    if numpy_client:
        app = ClientApp(client_fn=lambda context: client_fn(context).to_client())
        keys = {"arrayrecord_key": "fitins.parameters"}
        keys |= {"configrecord_key": "fitins.config"}
    strategy = SafeDSHB(rule, F, rate, momentum, **keys)  # type: ignore[arg-type]
    zeros = {k: torch.zeros_like(v) for k, v in model.state_dict().items()}
    result = strategy.start(InProcessGrid(app, N), ArrayRecord(zeros), STEPS)
    assert list(result.arrays) == ["weight", "bias"]
    return flat(result.arrays)


@pytest.mark.federation
@pytest.mark.parametrize("rule", [SMEA(), Filter(), Average()])
@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
@pytest.mark.parametrize("numpy_client", [False, True])
def test_strategy_and_clients_are_algorithm_1(
    rule: Rule, sampling: Sampling, numpy_client: bool
) -> None:
    plan = make_plan(sampling)
    expected = algorithm_1(rule, plan)
    assert np.abs(expected).max() > 0.5
    found = train(rule, plan, numpy_client)
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-5)


def test_it_is_a_numpy_client() -> None:
    assert issubclass(SafeDSHBClient, NumPyClient)
