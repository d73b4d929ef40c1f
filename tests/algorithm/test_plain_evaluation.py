"""Nodes evaluate the model: random ones, enough of them, and none is believed."""

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.app import RecordDict as Records
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result

from flwr_safedshb.aggregation import Average
from flwr_safedshb.algorithm.plain_evaluation import compute_medians
from flwr_safedshb.app import client_app
from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.simulation.in_process import InProcessGrid
from flwr_safedshb.strategy import SafeDSHB
from tests.clients import THETA, make

NODES = 5
LIE = -5e8


def federation(asked: list[int], liars: int) -> ClientApp:
    """Nodes of which the first lie; each writes down that it was asked."""
    app = client_app(make)
    evaluating = ClientApp()
    evaluating.train()(lambda message, context: app(message, context))

    @evaluating.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        asked.append(partition)
        lies = partition < liars
        metrics = MetricRecord({"accuracy": LIE if lies else 0.9})
        content = Records({"metrics": metrics})
        if lies:
            content["more"] = MetricRecord({"accuracy": LIE, "mine": 1.0})
            content["most"] = MetricRecord({"accuracy": LIE})
        return Message(content, reply_to=message)

    return evaluating


def run(app: ClientApp, nodes: int = NODES, **settings: float) -> Result:
    strategy = SafeDSHB(Average(), seed=1, **settings)  # type: ignore[arg-type]
    return strategy.start(InProcessGrid(app, nodes), ArrayRecord([*THETA]), 4)


def test_random_nodes_are_asked_and_enough_of_them() -> None:
    asked: list[int] = []
    result = run(
        federation(asked, 2), nodes=9, fraction_evaluate=0.4, num_malicious_nodes=2
    )
    rounds = [asked[i : i + 5] for i in range(0, len(asked), 5)]
    assert len(rounds) == 4  # of 5 = 2f + 1, though 0.4 of 9 is 3
    assert len({frozenset(nodes) for nodes in rounds}) > 1
    for metrics in result.evaluate_metrics_clientapp.values():
        assert dict(metrics) == {"accuracy": 0.9}


def test_one_liar_decides_nothing() -> None:
    result = run(federation([], 1), fraction_evaluate=0.4, num_malicious_nodes=1)
    found = result.evaluate_metrics_clientapp
    assert {metrics["accuracy"] for metrics in found.values()} == {0.9}


def test_too_few_evaluators_are_refused() -> None:
    with pytest.raises(ValueError, match=r"min_evaluate_nodes=2 must be at least 2f"):
        SafeDSHB(num_malicious_nodes=1, min_evaluate_nodes=2)


def test_too_few_answers_are_no_result() -> None:
    replies = [
        Message(Records({"metrics": MetricRecord({"loss": 1.0})}), 1, "evaluate")
        for _ in range(2)
    ]
    assert compute_medians(replies, 1) == {}
    assert compute_medians(replies, 0) == {"loss": 1.0}


class Evaluates(SafeDSHBClient):
    """A client that evaluates, as the older API has it."""

    def evaluate(self, parameters: object, config: object) -> object:  # type: ignore[override]
        return 0.5, 20, {"accuracy": 0.75, "name": "node"}


@pytest.mark.parametrize("older", [False, True])
def test_the_metrics_of_a_numpy_client_are_kept(older: bool) -> None:
    def client_fn(context: Context) -> SafeDSHBClient:
        client = make(context)
        client.__class__ = Evaluates
        return client

    app, keys = client_app(client_fn), ("arrays", "config")
    if older:
        app = ClientApp(client_fn=lambda context: client_fn(context).to_client())
        keys = ("fitins.parameters", "fitins.config")
    strategy = SafeDSHB(
        fraction_evaluate=1.0, arrayrecord_key=keys[0], configrecord_key=keys[1]
    )
    result = strategy.start(
        InProcessGrid(app, 3),
        ArrayRecord([*THETA]),
        1,
        evaluate_config=ConfigRecord({"x": 1}),
    )
    metrics = dict(result.evaluate_metrics_clientapp[1])
    assert metrics.pop("num-examples", None) or metrics.pop("num_examples", None)
    assert metrics == {"accuracy": 0.75, "loss": 0.5}
