"""Who takes part: strangers are warned of, and refusals are heard, by node."""

import logging
from collections.abc import Iterable
from pathlib import Path

import pytest
from flwr.app import Array, ArrayRecord, Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.superlink.grid import HttpGrid

from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.app import client_app
from flwr_safedshb.attacks import SignFlip
from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.flower.grid import WrappedGrid
from flwr_safedshb.simulation.adversarial import AdversarialGrid
from flwr_safedshb.simulation.in_process import InProcessGrid
from flwr_safedshb.strategy import SafeDSHB
from tests.clients import THETA, make, node
from tests.federation import federation, model


class Remote(HttpGrid):
    """A Grid of the deployment, behind which there are nodes of this process."""

    def __init__(self, nodes: InProcessGrid, insecure: bool) -> None:
        super().__init__(insecure=insecure, token="x")
        self.nodes = nodes
        self.set_run(nodes.run)

    def get_node_ids(self) -> Iterable[int]:
        return self.nodes.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self.nodes.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.nodes.pull_messages(message_ids)


def warnings(
    caplog: pytest.LogCaptureFixture, grid: Grid, f: int, authenticated: bool
) -> list[str]:
    caplog.clear()
    strategy = SafeDSHB(SMEA(), f, authenticated_nodes=authenticated)
    with caplog.at_level(logging.WARNING, "flwr"):
        strategy.start(grid, model(), 1)
    found = [record.getMessage() for record in caplog.records]
    return [message for message in found if "ANYONE" in message]


def remote(insecure: bool) -> Remote:
    return Remote(federation(5), insecure)


def test_strangers_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for told in (False, True):
        (warning,) = warnings(caplog, remote(insecure=True), 2, told)
        assert warning.startswith("ANYONE CAN JOIN: ")
        assert "num_malicious_nodes=2 means nothing" in warning
        assert "--enable-supernode-auth" in warning
    (warning,) = warnings(caplog, remote(insecure=False), 2, False)
    assert warning.startswith("CAN ANYONE JOIN? ")
    assert "authenticated_nodes=True" in warning
    attacked = AdversarialGrid(remote(insecure=True), SignFlip(), 1, SMEA())
    assert len(warnings(caplog, attacked, 1, False)) == 1


def test_a_grid_that_nobody_knows_may_hold_strangers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # It does what a WrappedGrid does, and is none.
    unknown = type("Unknown", (Grid,), dict(vars(WrappedGrid)))(federation(5))
    (warning,) = warnings(caplog, unknown, 2, False)
    assert warning.startswith("CAN ANYONE JOIN? ")
    assert warnings(caplog, unknown, 2, True) == []


def test_no_warning_without_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings(caplog, remote(insecure=False), 2, True) == []
    assert warnings(caplog, remote(insecure=True), 0, False) == []
    assert warnings(caplog, federation(5), 2, False) == []


FLOORS: dict[int, dict[str, float | str]] = {
    1: {"min-noise-multiplier": 2.0},
    3: {"max-clip-norm": 0.5},
}


def test_a_node_whose_floor_is_not_met_refuses_and_the_server_logs_the_rule(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def careful(context: Context) -> SafeDSHBClient:
        """Make a client whose node has a floor; the plan's are 1 and 1."""
        number = int(context.node_config["partition-id"])
        own = node(tmp_path / str(number), min_noise_multiplier=1.0).node_config
        own = {**own, **FLOORS.get(number, {})}
        return make(Context(context.run_id, context.node_id, own, context.state, {}))

    initial = ArrayRecord(
        {name: Array(x) for name, x in zip(("weight", "bias"), THETA, strict=True)}
    )
    grid = InProcessGrid(client_app(careful), 5)
    with caplog.at_level(logging.INFO, "flwr"):
        result = SafeDSHB(SMEA(), 1).start(grid, initial, 1)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["replies"], metrics["excluded-error"]) == (3, 2)
    assert metrics["num-malicious-nodes"] == 1  # to refuse is no proof of anything
    ids = sorted(grid.get_node_ids())
    for index, rule in ((1, "min-noise-multiplier=2.0"), (3, "max-clip-norm=0.5")):
        line = f"Node {ids[index]} is excluded: error: "
        (said,) = [r.getMessage() for r in caplog.records if line in r.getMessage()]
        assert f"this node's policy {rule} refuses the run, which asks for 1.0" in said


def test_the_words_of_a_node_are_one_short_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        text = "\x1b[2J\r\nRound 9: all is well" + "x" * 10**6
        return Message(Error(2, text), reply_to=message)

    with (
        caplog.at_level(logging.INFO, "flwr"),
        pytest.raises(RuntimeError, match="nothing was trained"),
    ):
        SafeDSHB(SMEA(), 0).start(InProcessGrid(app, 1), model(), 1)
    (said,) = [
        r.getMessage() for r in caplog.records if "is excluded" in r.getMessage()
    ]
    assert "[2J  Round 9: all is well" in said
    assert said.strip().isprintable()
    assert len(said) < 400
