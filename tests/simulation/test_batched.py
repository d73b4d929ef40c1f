"""All clients of a round as one batch reply what each would reply alone."""

import numpy as np
import pytest
import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import nn

from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.app import client_app
from flwr_safedshb.attacks import ALIE
from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.plan import PrivacyPlan, Sampling
from flwr_safedshb.privacy.randomness.noise import Randomness, SeededRandomness
from flwr_safedshb.privacy.samplers.standard import Fixed
from flwr_safedshb.simulation.adversarial import AdversarialGrid
from flwr_safedshb.simulation.batched import BatchedGrid
from flwr_safedshb.simulation.in_process import InProcessGrid
from flwr_safedshb.strategy import SafeDSHB
from simulations.engines import run
from tests.federation import flat

N, STEPS = 7, 30


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets.unsqueeze(1)).square().sum(dim=1)


def examples(node: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(node)
    inputs = torch.randn(60, 5, generator=rng)
    return inputs, inputs[:, 0] - inputs[:, 1]


def make_app(
    model: nn.Module, sampling: Sampling = "fixed", kind: type = SafeDSHBClient
) -> ClientApp:
    plan = PrivacyPlan(1.0, 0.5, 8, 60, sampling)

    def client_fn(context: Context) -> SafeDSHBClient:
        node = int(context.node_config["partition-id"])
        if node == context.run_config.get("broken"):
            raise OSError("no data here")
        client: SafeDSHBClient = kind(
            model,
            squares,
            examples(node),
            plan,
            context,
            weight_decay=0.01,
            randomness=SeededRandomness(4),
        )
        return client

    return client_app(client_fn)


def train(grid: InProcessGrid, model: nn.Module) -> NDArray[np.float64]:
    strategy = SafeDSHB(SMEA(), 3, 0.5, 0.8, seed=1)
    initial = ArrayRecord({k: v * 0 + 0.1 for k, v in model.state_dict().items()})
    return flat(strategy.start(grid, initial, STEPS).arrays)


@pytest.mark.federation
@pytest.mark.parametrize(
    "model",
    [nn.Linear(5, 1), nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))],
)
@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_same_model_as_one_by_one(model: nn.Module, sampling: Sampling) -> None:
    app = make_app(model, sampling)
    alone = train(InProcessGrid(app, N), model)
    together = train(BatchedGrid(app, N), model)
    assert np.abs(alone - 0.1).max() > 0.3
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(train(BatchedGrid(app, N), model), together)


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_clients_do_go_through_the_model_at_once(
    monkeypatch: pytest.MonkeyPatch, sampling: Sampling
) -> None:
    sizes = []
    consume = ClippedGradients.consume_batch

    def count(
        self: ClippedGradients,
        batch: tuple[torch.Tensor, torch.Tensor],
        groups: int = 1,
        usable: torch.Tensor | None = None,
    ) -> torch.Tensor:
        sizes.append(groups)
        return consume(self, batch, groups, usable)

    monkeypatch.setattr(ClippedGradients, "consume_batch", count)
    model = nn.Linear(5, 1)
    train(BatchedGrid(make_app(model, sampling), N), model)
    assert sizes == [N] * STEPS


def test_no_two_nodes_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    draw = Fixed.draw

    def watch(
        self: Fixed, plan: PrivacyPlan, randomness: Randomness
    ) -> NDArray[np.int64]:
        drawn.append(draw(self, plan, randomness))
        return drawn[-1]

    monkeypatch.setattr(Fixed, "draw", watch)
    model = nn.Linear(5, 1)
    train(BatchedGrid(make_app(model), N), model)
    assert len(drawn) == N * STEPS
    assert len({tuple(batch) for batch in drawn}) == N * STEPS


def asked(grid: InProcessGrid, model: nn.Module, nodes: list[int]) -> list[Message]:
    arrays = ArrayRecord(model.state_dict())
    config = ConfigRecord({"step": 0, "momentum": 0.0, "session": "s"})
    content = RecordDict({"arrays": arrays, "config": config})
    messages = [Message(content, dst_node_id=i, message_type="train") for i in nodes]
    return list(grid.send_and_receive(messages))


def test_one_broken_node_is_its_own_error_and_no_other() -> None:
    model = nn.Linear(5, 1)
    grid = BatchedGrid(make_app(model), N, {"broken": 2})
    nodes = grid.get_node_ids()
    replies = asked(grid, model, [*nodes, 12345])
    errors = [reply.has_error() for reply in replies]
    assert errors == [False, False, True, False, False, False, False, True]
    assert "could not be made" in str(replies[2].error.reason)
    assert "no data here" not in str(replies[2].error.reason)
    assert [r.metadata.src_node_id for r in replies] == [*nodes, 12345]
    whole = asked(InProcessGrid(make_app(model), N), model, nodes)
    for mine, right in zip(replies, whole, strict=False):
        if not mine.has_error():
            found, expected = (flat(r.content["arrays"]) for r in (mine, right))  # type: ignore[arg-type]
            np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_client_with_its_own_fit_keeps_it() -> None:
    class Loud(SafeDSHBClient):
        def fit(self, parameters, config):  # type: ignore[no-untyped-def]
            layers, _, metrics = super().fit(parameters, config)
            return layers, 999, metrics

    model = nn.Linear(5, 1)
    grid = BatchedGrid(make_app(model, kind=Loud), N)
    for reply in asked(grid, model, grid.get_node_ids()):
        assert reply.content["metrics"]["num-examples"] == 999


def test_other_apps_and_adversaries_run_on_it() -> None:
    app = ClientApp()

    @app.train()
    def echo(message: Message, context: Context) -> Message:
        records = {
            "arrays": message.content["arrays"],
            "metrics": MetricRecord({"num-examples": 1}),
        }
        return Message(RecordDict(records), reply_to=message)

    model = nn.Linear(5, 1)
    echoing = BatchedGrid(app, 3)
    replies = asked(echoing, model, echoing.get_node_ids())
    assert [reply.has_error() for reply in replies] == [False] * 3
    grid = BatchedGrid(make_app(model), N)
    hijacked = AdversarialGrid(grid, ALIE(), 3, SMEA())
    found = train(hijacked, model)  # type: ignore[arg-type]
    assert np.isfinite(found).all()


@pytest.mark.federation
def test_it_is_an_engine() -> None:
    small = ["num_nodes=4", "num_malicious_nodes=1", "steps=30", "attack=foe"]
    small += ["momentum=0.5", "data.num_examples=400"]
    alone, together = run(small), run([*small, "engine=batched"])
    expected = flat(alone.arrays)
    np.testing.assert_allclose(flat(together.arrays), expected, atol=1e-4)
    assert [m["left-out"] for m in alone.train.values()] == [
        m["left-out"] for m in together.train.values()
    ]
