"""What a server tells its nodes about the length of a run."""

import logging

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context

from flwr_safedshb.algorithm.answer_evaluation import PrivateEvaluation
from flwr_safedshb.algorithm.wire import RUN_EVALUATIONS, RUN_STEPS
from flwr_safedshb.app import client_app
from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.simulation.in_process import InProcessGrid
from flwr_safedshb.strategy import SafeDSHB
from tests.clients import THETA, Scalar, make

told: list[dict[str, Scalar]] = []


class Listening(SafeDSHBClient):
    def fit(self, parameters, config):  # type: ignore[no-untyped-def]
        told.append(dict(config))
        return super().fit(parameters, config)

    def evaluate(self, parameters, config):  # type: ignore[no-untyped-def]
        return 0.5, 20, {}


def listen(context: Context) -> SafeDSHBClient:
    client = make(context, evaluation=PrivateEvaluation(5.0), delta=1e-5)
    client.__class__ = Listening
    return client


@pytest.fixture
def initial() -> ArrayRecord:
    told.clear()
    names = zip(("weight", "bias"), THETA, strict=True)
    return ArrayRecord({name: Array(x) for name, x in names})


@pytest.mark.parametrize(
    ("settings", "steps", "evaluations"),
    [
        ({}, 5, 0),
        ({"local_steps": 3}, 15, 0),
        ({"evaluate_every": 2}, 5, 3),
        ({"evaluate_every": 5}, 5, 1),
    ],
)
def test_every_message_says_the_most_steps_and_evaluations(
    initial: ArrayRecord, settings: dict[str, int], steps: int, evaluations: int
) -> None:
    strategy = SafeDSHB(num_malicious_nodes=1, **settings)  # type: ignore[arg-type]
    result = strategy.start(InProcessGrid(client_app(listen), 3), initial, 5)
    assert len(told) == 15
    for config in told:
        assert (config[RUN_STEPS], config[RUN_EVALUATIONS]) == (steps, evaluations)
    assert len(result.evaluate_metrics_clientapp) == evaluations


def test_a_length_that_is_not_known_is_not_told(initial: ArrayRecord) -> None:
    grid = InProcessGrid(client_app(listen), 3)
    # Nodes that are drawn now and then take far fewer steps than the run.
    partly = SafeDSHB(fraction_train=0.5, min_available_nodes=3)
    partly.start(grid, initial, 2)
    # And this one is used without `start`.
    by_hand = SafeDSHB(num_malicious_nodes=1)
    messages = list(by_hand.configure_train(1, initial, ConfigRecord(), grid))
    list(grid.send_and_receive(messages))
    assert len(told) > 3
    assert not any(RUN_STEPS in config for config in told)


def test_evaluations_without_noise_are_warned_of_and_named_at_the_end(
    initial: ArrayRecord, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "flwr"):
        strategy = SafeDSHB(num_malicious_nodes=1, fraction_evaluate=1.0)
        strategy.start(InProcessGrid(client_app(listen), 3), initial, 2)
        plain = [record.getMessage() for record in caplog.records]
        caplog.clear()
        strategy = SafeDSHB(num_malicious_nodes=1, evaluate_every=1)
        strategy.start(InProcessGrid(client_app(listen), 3), initial, 2)
        private = [record.getMessage() for record in caplog.records]
    assert any("outside of their privacy guarantee" in line for line in plain)
    assert not any("outside of their privacy" in line for line in private)
    (line,) = [line for line in plain if line.startswith("Privacy, as 3 nodes")]
    assert line.endswith("evaluations without noise are NOT covered")
    (line,) = [line for line in private if line.startswith("Privacy, as 3 nodes")]
    assert "NOT covered" not in line
