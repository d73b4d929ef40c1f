"""Clients and strategies that do not belong together: nothing trains quietly."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.app import RecordDict as Records
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import NDArrays
from flwr.serverapp.strategy import FedAvg, Krum, Strategy

from flwr_safedshb.aggregation import Average
from flwr_safedshb.algorithm.checkpoint import load
from flwr_safedshb.algorithm.screening import ForeignClientsError
from flwr_safedshb.app import client_app
from flwr_safedshb.attacks import SignFlip
from flwr_safedshb.simulation.adversarial import AdversarialGrid
from flwr_safedshb.simulation.in_process import InProcessGrid
from flwr_safedshb.strategy import SafeDSHB
from tests.clients import THETA, make

NODES = 3


def initial() -> ArrayRecord:
    return ArrayRecord([*THETA])


def ordinary(message: Message, context: Context) -> Message:
    """Answer as a client of FedAvg: with weights, as if they were trained."""
    arrays = message.content.array_records["arrays"].to_numpy_ndarrays()
    trained = ArrayRecord([array + np.float32(1.0) for array in arrays])
    metrics = MetricRecord({"num-examples": 20})
    return Message(Records({"arrays": trained, "metrics": metrics}), reply_to=message)


def fedavg_client() -> ClientApp:
    app = ClientApp()
    app.train()(ordinary)
    return app


def started(strategy: Strategy, app: ClientApp, rounds: int = 2) -> ArrayRecord:
    grid = InProcessGrid(app, NODES)
    return strategy.start(grid, initial(), num_rounds=rounds).arrays


def test_our_client_under_our_strategy_trains() -> None:
    arrays = started(SafeDSHB(Average()), client_app(make))
    assert not np.array_equal(arrays.to_numpy_ndarrays()[0], THETA[0])


def test_weights_are_not_taken_for_momentums(tmp_path: Path) -> None:
    strategy = SafeDSHB(Average(), checkpoint=tmp_path / "run.npz")
    with pytest.raises(ForeignClientsError, match=r"3 replies .* foreign_clients=True"):
        started(strategy, fedavg_client())
    saved = load(tmp_path / "run.npz")
    assert saved is None or saved.step == 0


def test_foreign_clients_are_taken_where_that_is_said() -> None:
    arrays = started(SafeDSHB(Average(), foreign_clients=True), fedavg_client(), 1)
    # The step goes against what was sent, weights plus one.
    expected = THETA[0] - (THETA[0] + 1.0)
    np.testing.assert_allclose(arrays.to_numpy_ndarrays()[0], expected, rtol=1e-6)


def test_adversaries_without_the_mark_are_excluded_and_end_nothing() -> None:
    """One of three leaves it out, and f is 1."""

    def mixed(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == NODES - 1:
            return ordinary(message, context)
        return honest(message, context)

    honest = client_app(make)
    app = ClientApp()
    app.train()(mixed)
    strategy = SafeDSHB(Average(), num_malicious_nodes=1)
    result = strategy.start(InProcessGrid(app, NODES), initial(), num_rounds=2)
    for metrics in result.train_metrics_clientapp.values():
        assert metrics["excluded-unmarked"] == 1
        assert metrics["skipped"] == 0


def test_what_an_adversarial_grid_sends_looks_like_ours() -> None:
    grid = AdversarialGrid(InProcessGrid(client_app(make), NODES), SignFlip(), 1)
    strategy = SafeDSHB(Average(), num_malicious_nodes=1)
    result = strategy.start(grid, initial(), num_rounds=1)
    assert result.train_metrics_clientapp[1]["excluded"] == 0


class Ordinary(NumPyClient):
    """A NumPyClient of FedAvg."""

    def fit(self, parameters: NDArrays, config: object) -> object:  # type: ignore[override]
        return [array + np.float32(1.0) for array in parameters], 20, {}

    def evaluate(self, parameters: NDArrays, config: object) -> object:  # type: ignore[override]
        return 0.5, 20, {"accuracy": 1.0}


def evaluating(app: ClientApp) -> ClientApp:
    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"accuracy": 1.0, "num-examples": 20})
        return Message(Records({"metrics": metrics}), reply_to=message)

    return app


# What a user may have on the nodes, and the keys that it takes.
CLIENTS: dict[str, Callable[[], ClientApp]] = {
    "ours": lambda: evaluating(client_app(make)),
    "FedAvg's": lambda: evaluating(fedavg_client()),
    "NumPyClient": lambda: ClientApp(client_fn=lambda _: Ordinary().to_client()),
}
KEYS = {
    "NumPyClient": {
        "arrayrecord_key": "fitins.parameters",
        "configrecord_key": "fitins.config",
    }
}
STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "SafeDSHB": lambda **keys: SafeDSHB(Average(), fraction_evaluate=1.0, **keys),
    "FedAvg": lambda **keys: FedAvg(min_train_nodes=NODES, **keys),
    "Krum": lambda **keys: Krum(min_train_nodes=NODES, **keys),
}
# Everything else ends without a model, or says why it does not start.
TRAINS = {
    ("ours", "SafeDSHB"),
    ("FedAvg's", "FedAvg"),
    ("FedAvg's", "Krum"),
}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("keys", [False, True], ids=["keys", "older keys"])
def test_only_what_belongs_together_leaves_a_model(
    client: str, strategy: str, keys: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also under the keys by which a Message strategy reaches a NumPyClient."""
    chosen = STRATEGIES[strategy](**(KEYS["NumPyClient"] if keys else {}))
    grid = InProcessGrid(CLIENTS[client](), NODES)
    try:
        arrays: ArrayRecord | None = chosen.start(grid, initial(), num_rounds=2).arrays
    except Exception:
        arrays = None
    moved = bool(arrays) and not np.array_equal(
        next(iter(arrays.values())).numpy(),  # type: ignore[union-attr]
        THETA[0],
    )
    if keys:
        # Clients of the Message API look for their own keys; ours take any.
        assert moved == ((client, strategy) == ("ours", "SafeDSHB"))
    else:
        assert moved == ((client, strategy) in TRAINS)


@pytest.mark.parametrize("strategy", ["FedAvg", "Krum"])
def test_our_client_says_why_it_refuses_other_strategies(
    strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    arrays = started(STRATEGIES[strategy](), client_app(make), 1)
    assert "the message must have step" in caplog.text
    assert "SafeDSHB" in caplog.text
    assert not arrays


def test_nothing_is_evaluated_that_was_not_trained() -> None:
    """FedAvg's clients under our strategy: the run ends before they are asked."""
    asked: list[int] = []
    app = fedavg_client()

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        asked.append(1)
        metrics = MetricRecord({"accuracy": 1.0})
        return Message(Records({"metrics": metrics}), reply_to=message)

    with pytest.raises(ForeignClientsError):
        started(SafeDSHB(Average(), fraction_evaluate=1.0), app)
    assert not asked


def test_if_all_fail_in_the_first_round_the_run_ends(tmp_path: Path) -> None:
    def broken(message: Message, context: Context) -> Message:
        raise KeyError("labels")

    app = ClientApp()
    app.train()(broken)
    strategy = SafeDSHB(Average(), checkpoint=tmp_path / "run.npz")
    with pytest.raises(RuntimeError, match=r"first step \(3 error\).*nothing was trai"):
        started(strategy, app)
    saved = load(tmp_path / "run.npz")
    assert saved is None or saved.step == 0


def test_one_that_fails_ends_nothing() -> None:
    def broken(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 0:
            raise KeyError("labels")
        return honest(message, context)

    honest = client_app(make)
    app = ClientApp()
    app.train()(broken)
    arrays = started(SafeDSHB(Average()), app)
    assert not np.array_equal(arrays.to_numpy_ndarrays()[0], THETA[0])


def test_settings_that_do_nothing_are_named(caplog: pytest.LogCaptureFixture) -> None:
    grid = InProcessGrid(client_app(make), NODES)
    config = ConfigRecord({"lr": 0.1, "local_epochs": 3, "mine": 1})
    SafeDSHB(Average()).start(grid, initial(), num_rounds=2, train_config=config)
    told = [r.getMessage() for r in caplog.records if "train_config has" in r.msg]
    assert len(told) == 1
    assert told[0].startswith("train_config has lr, local_epochs, which")
