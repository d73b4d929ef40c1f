"""Apps of the older kind: the same run as that of a Message-API app, to the byte."""

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import NDArrays, ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.serverapp import ServerApp

from flwr_safedshb import (
    ClassicStrategy,
    PrivacyPlan,
    PrivateEvaluation,
    SafeDSHB,
    load_checkpoint,
)
from flwr_safedshb.aggregation import SMEA, Average
from flwr_safedshb.algorithm.screening import ForeignClientsError
from flwr_safedshb.app import client_app
from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.simulation.in_process import InProcessGrid
from tests.clients import THETA, make

ROUNDS = 4
# The older server meets its clients one by one, and would begin with two of them.
ALL: dict[str, Any] = {"min_available_nodes": 3}
INITIAL = ndarrays_to_parameters([*THETA])


def older(client_fn: Callable[[Context], NumPyClient]) -> ClientApp:
    return ClientApp(client_fn=lambda context: client_fn(context).to_client())


def served(
    strategy: ClassicStrategy, app: ClientApp, nodes: int = 3, rounds: int = ROUNDS
) -> list[NDArrays]:
    """Run a server_fn in process; returns the models that it evaluated."""
    seen: list[NDArrays] = []
    strategy.evaluate_fn = lambda number, arrays, config: seen.append(arrays)

    def server_fn(context: Context) -> ServerAppComponents:
        config = ServerConfig(num_rounds=rounds)
        return ServerAppComponents(strategy=strategy, config=config)

    server = ServerApp(server_fn=server_fn)
    server(InProcessGrid(app, nodes), Context(1, 1, {}, RecordDict(), {}))
    return seen


def expected(rounds: int = ROUNDS, nodes: int = 3, **settings: object) -> NDArrays:
    """Return the result of the same run in an app of today's kind."""
    strategy = SafeDSHB(**settings)  # type: ignore[arg-type]
    grid = InProcessGrid(client_app(make), nodes)
    arrays = strategy.start(grid, ArrayRecord([*THETA]), rounds).arrays
    return arrays.to_numpy_ndarrays()


def equal(first: NDArrays, second: NDArrays) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


OPTIONS: list[dict[str, object]] = [
    {},
    {"aggregation": SMEA(), "num_malicious_nodes": 1, "momentum": 0.5},
    {"server_learning_rate": lambda step: 1.0 / (1 + step), "local_steps": 2},
]


@pytest.mark.federation
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("app", [older(make), client_app(make)])
def test_it_is_the_same_run(options: dict[str, object], app: ClientApp) -> None:
    strategy = ClassicStrategy(SafeDSHB(**options, **ALL), INITIAL)  # type: ignore[arg-type]
    models = served(strategy, app)
    assert len(models) == ROUNDS + 1
    assert equal(models[0], [*THETA])
    assert equal(models[-1], expected(ROUNDS, 3, **options))


def test_where_the_last_round_is_not_known_all_state_the_cost() -> None:
    """A statement of the first round alone would be taken for that of the run."""
    strategy = SafeDSHB(**ALL)
    models = served(
        ClassicStrategy(strategy, INITIAL), older(lambda c: make(c, delta=1e-4))
    )
    assert len(models) == ROUNDS + 1
    assert strategy.run.progress is not None
    told = [
        metrics["stated-epsilon"] for metrics in strategy.run.progress.train.values()
    ]
    assert len(told) == ROUNDS
    assert all(before < after for before, after in itertools.pairwise(told))  # type: ignore[operator]


@pytest.mark.parametrize("output", ["average", "uniform"])
def test_outputs_are_the_same(output: str) -> None:
    strategy = SafeDSHB(output=output, seed=4, **ALL)  # type: ignore[arg-type]
    classic = ClassicStrategy(strategy, ArrayRecord([*THETA]), num_rounds=ROUNDS)
    models = served(classic, older(make))
    assert equal(models[-1], expected(output=output, seed=4))
    with pytest.raises(ValueError, match="needs num_rounds here"):
        ClassicStrategy(strategy, INITIAL)


def test_a_run_is_taken_up_from_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"

    def classic(rounds: int) -> ClassicStrategy:
        strategy = SafeDSHB(checkpoint=path, seed=4, **ALL)
        return ClassicStrategy(strategy, INITIAL, num_rounds=rounds)

    served(classic(2), older(make), rounds=2)
    assert load_checkpoint(path).step == 2
    models = served(classic(5), older(make), rounds=5)
    assert load_checkpoint(path).step == 5
    # Simulated clients that are made anew begin with another momentum.
    assert not equal(models[0], [*THETA])


def test_a_run_stops_when_its_user_says(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"

    def enough(number: int, metrics: Mapping[str, object]) -> bool:
        return number == 2

    strategy = SafeDSHB(stop_when=enough, seed=4, checkpoint=path, **ALL)
    models = served(ClassicStrategy(strategy, INITIAL, num_rounds=6), older(make))
    assert load_checkpoint(path).step == 2
    assert equal(models[-1], expected(2, seed=4))


class Ordinary(NumPyClient):
    """A client of FedAvg: it answers with weights, as if they were trained."""

    def fit(self, parameters: NDArrays, config: object) -> object:  # type: ignore[override]
        return [array + np.float32(1.0) for array in parameters], 20, {}

    def evaluate(self, parameters: NDArrays, config: object) -> object:  # type: ignore[override]
        return 0.5, 20, {"accuracy": 0.75, "name": "node"}


def test_weights_are_not_taken_for_momentums() -> None:
    strategy = ClassicStrategy(SafeDSHB(Average()), INITIAL)
    with pytest.raises(ForeignClientsError, match="foreign_clients=True"):
        served(strategy, older(lambda context: Ordinary()))


def test_if_all_fail_in_the_first_round_the_run_ends() -> None:
    def failing(context: Context) -> NumPyClient:
        raise KeyError("labels")

    strategy = ClassicStrategy(SafeDSHB(Average()), INITIAL)
    with pytest.raises(RuntimeError, match=r"first step \(3 error\)"):
        served(strategy, older(failing))


def test_one_that_fails_or_sends_nonsense_ends_nothing() -> None:
    def client_fn(context: Context) -> NumPyClient:
        partition = context.node_config["partition-id"]
        if partition == 0:
            raise KeyError("labels")
        return Ordinary() if partition == 1 else make(context)

    strategy = ClassicStrategy(SafeDSHB(Average(), num_malicious_nodes=1), INITIAL)
    models = served(strategy, older(client_fn), nodes=5)
    assert not equal(models[-1], models[0])


class Both(SafeDSHBClient):
    evaluate = Ordinary.evaluate  # type: ignore[assignment]


def test_clients_evaluate_and_their_metrics_are_kept() -> None:
    def client_fn(context: Context) -> NumPyClient:
        client = make(context)
        client.__class__ = Both
        return client

    strategy = ClassicStrategy(SafeDSHB(Average(), fraction_evaluate=1.0), INITIAL)
    found: list[object] = []
    aggregate = strategy.aggregate_evaluate

    def keep(*arguments: object) -> object:
        found.append(aggregate(*arguments))  # type: ignore[arg-type]
        return found[-1]

    strategy.aggregate_evaluate = keep  # type: ignore[assignment,method-assign]
    served(strategy, older(client_fn))
    assert found == [(0.5, {"accuracy": 0.75})] * ROUNDS


@pytest.mark.federation
@pytest.mark.parametrize("wrap", [older, client_app])
def test_nodes_evaluate_privately_whatever_else_they_can(
    wrap: Callable[..., ClientApp],
) -> None:
    """The same figures as in an app of today's kind, and never the plain ones."""
    evaluation = PrivateEvaluation(2.0, held_out=4)

    def client_fn(context: Context) -> NumPyClient:
        plan = PrivacyPlan(1.0, 1.0, 4, 16)
        client = make(context, plan=plan, evaluation=evaluation)
        client.__class__ = Both
        return client

    def run_newer() -> object:
        strategy = SafeDSHB(Average(), evaluate_every=2)
        grid = InProcessGrid(client_app(client_fn), 3)  # type: ignore[arg-type]
        result = strategy.start(grid, ArrayRecord([*THETA]), ROUNDS)
        return [dict(found) for found in result.evaluate_metrics_clientapp.values()]

    safe = SafeDSHB(Average(), evaluate_every=2, **ALL)
    strategy = ClassicStrategy(safe, INITIAL, num_rounds=ROUNDS)
    found: list[object] = []
    aggregate = strategy.aggregate_evaluate

    def keep(*arguments: object) -> object:
        answer = aggregate(*arguments)  # type: ignore[arg-type]
        found.extend([answer[1]] if answer[1] else [])
        return answer

    strategy.aggregate_evaluate = keep  # type: ignore[assignment,method-assign]
    served(strategy, wrap(client_fn))
    assert len(found) == 2
    assert found == run_newer()


def test_counts_by_class_need_the_message_api() -> None:
    safe = SafeDSHB(evaluate_every=2, evaluate_per_class=True)
    with pytest.raises(ValueError, match="evaluate_per_class=True needs"):
        ClassicStrategy(safe, INITIAL)


@pytest.mark.parametrize("kind", ["fit", "evaluate"])
def test_an_average_that_one_client_decides_is_refused_with_the_remedy(
    kind: str,
) -> None:
    text = f"{kind}_metrics_aggregation_fn is not taken: one hostile .*evaluate_every"
    with pytest.raises(ValueError, match=text):
        ClassicStrategy(
            SafeDSHB(),
            ArrayRecord([np.zeros(2)]),
            **{f"{kind}_metrics_aggregation_fn": max},  # type: ignore[arg-type]
        )
