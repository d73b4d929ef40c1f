"""What a new user gets wrong on the server is said before a node spends any budget."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import Krum, Result

from flwr_safedshb.aggregation import SMEA, Average
from flwr_safedshb.app import client_app
from flwr_safedshb.legacy_api import ClassicStrategy
from flwr_safedshb.simulation.in_process import InProcessGrid
from flwr_safedshb.strategy import SafeDSHB
from tests.clients import THETA, make

NODES = 3
START = ArrayRecord([*THETA])
UNREAL = THETA[0] * np.float32(np.nan)
SAME_START = r"start the run from trained_arrays\(model\)"


def untouched(context: Context) -> Any:
    raise AssertionError("a node was asked")


def started(
    strategy: SafeDSHB, arrays: Any = START, app: ClientApp | None = None, **more: Any
) -> Result:
    grid = InProcessGrid(app or client_app(untouched), NODES)
    return strategy.start(grid, arrays, **{"num_rounds": 2, **more})


def components() -> None:
    """Run Safe-DSHB as it is in an app of the older kind."""
    parts = ServerAppComponents(strategy=SafeDSHB(), config=ServerConfig(num_rounds=1))  # type: ignore[arg-type]
    app = ServerApp(server_fn=lambda context: parts)
    grid = InProcessGrid(client_app(untouched), NODES)
    app(grid, Context(1, 1, {}, RecordDict(), {}))


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "the name of a rule": (
        lambda: SafeDSHB("smea"),  # type: ignore[arg-type]
        r"aggregation='smea' must be a rule .* SMEA\(\)",
    ),
    "the class of a rule": (lambda: SafeDSHB(SMEA), r"must be a rule"),  # type: ignore[arg-type]
    "a strategy as the rule": (lambda: SafeDSHB(Krum()), r"must be a rule"),  # type: ignore[arg-type]
    "adversaries as a float": (
        lambda: SafeDSHB(num_malicious_nodes=1.0),  # type: ignore[arg-type]
        r"num_malicious_nodes=1\.0 must be an integer",
    ),
    "rounds as text": (
        lambda: started(SafeDSHB(), num_rounds="3"),
        r"num_rounds='3' must be an integer",
    ),
    "a state_dict": (
        lambda: started(SafeDSHB(), {"weight": THETA[0]}),
        rf"are dict, not an ArrayRecord .*{SAME_START}",
    ),
    "a list of arrays": (lambda: started(SafeDSHB(), [*THETA]), SAME_START),
    "no arrays": (
        lambda: started(SafeDSHB(), ArrayRecord()),
        f"are empty.*{SAME_START}",
    ),
    "whole numbers": (
        lambda: started(SafeDSHB(), ArrayRecord([a.astype(int) for a in THETA])),
        rf"have '0' of int64, which cannot be trained; {SAME_START}",
    ),
    "values that are not finite": (
        lambda: started(SafeDSHB(), ArrayRecord([UNREAL])),
        rf"'0' with values that are not finite; {SAME_START}",
    ),
    "what evaluate_fn returns": (
        lambda: started(SafeDSHB(), evaluate_fn=lambda number, arrays: (0.1, {})),
        r"evaluate_fn returns a tuple; return a MetricRecord",
    ),
    "a folder as the checkpoint": (
        lambda: started(SafeDSHB(checkpoint=Path(__file__).parent)),
        r"is not a checkpoint .*directory.*; give another path",
    ),
    "Safe-DSHB in components": (components, r"strategy=ClassicStrategy\(SafeDSHB\("),
    "another strategy in ours": (
        lambda: ClassicStrategy(FedAvg(), START),  # type: ignore[arg-type]
        r"strategy is a FedAvg; give a SafeDSHB",
    ),
    "no initial parameters": (
        lambda: ClassicStrategy(SafeDSHB(), None),  # type: ignore[arg-type]
        SAME_START,
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_before_the_first_round(mistake: str) -> None:
    make_it, words = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError), match=words) as raised:
        make_it()
    assert len(textwrap.wrap(str(raised.value), 120)) <= 3


def test_metrics_of_the_server_may_be_a_dict() -> None:
    result = started(
        SafeDSHB(Average()),
        app=client_app(make),
        evaluate_fn=lambda number, arrays: {"accuracy": 0.5},
    )
    assert result.evaluate_metrics_serverapp[2] == MetricRecord({"accuracy": 0.5})


def test_a_client_of_the_older_kind_is_told_how_to_be_reached(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = ClientApp(client_fn=lambda context: NumPyClient().to_client())
    with pytest.raises(RuntimeError, match="no node could take the first step"):
        started(SafeDSHB(Average()), app=app)
    assert "put it into client_app(client_fn), or use ClassicStrategy" in caplog.text
