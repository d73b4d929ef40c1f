"""A private client with twenty examples, its node, and what it is asked."""

from pathlib import Path

import numpy as np
import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    RecordDict,
    UserConfig,
)
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from flwr_safedshb.algorithm.budget import LEDGER_NAME, LedgerBudget
from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.privacy.ledger.ledger import Ledger
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.randomness.noise import SeededRandomness
from flwr_safedshb.simulation.in_process import InProcessGrid

PLAN = PrivacyPlan(1.0, 1.0, 4, 20)
THETA = [np.full((1, 3), 0.25, np.float32), np.array([-0.5], np.float32)]
SECRET = 123456.75

Layers = list[NDArray[np.generic]]
Scalar = bool | bytes | float | int | str


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.squeeze(1) - targets) ** 2


def data() -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.normal(size=(20, 3)).astype(np.float32))
    return inputs, inputs.sum(dim=1)


def node(tmp_path: Path | None = None, **config: bool | float | str) -> Context:
    node_config: UserConfig = {k.replace("_", "-"): v for k, v in config.items()}
    if tmp_path is not None:
        node_config = {
            "state-dir": str(tmp_path / "state"),
            "max-epsilon": 50.0,
            "delta": 1e-5,
            "require-secure-noise": False,
            **node_config,
        }
    return Context(7, 11, node_config, RecordDict(), {})


def make(context: Context, seed: int | None = 3, **settings: object) -> SafeDSHBClient:
    randomness = None if seed is None else SeededRandomness(seed)
    arguments = {
        "model": torch.nn.Linear(3, 1),
        "loss": squares,
        "dataset": data(),
        "plan": PLAN,
        "randomness": randomness,
        **settings,
    }
    return SafeDSHBClient(context=context, **arguments)  # type: ignore[arg-type]


def ask(
    context: Context, step: int, beta: float = 0.5, anchor: bool = True, **more: str
) -> Layers:
    """Take a step as a client that is rebuilt for the message."""
    config: dict[str, Scalar] = {"step": step, "momentum": beta, "anchor": anchor}
    return make(context).fit([*THETA], {**config, **more})[0]


def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "state" / LEDGER_NAME)


def ledger_of(client: SafeDSHBClient) -> Ledger:
    assert isinstance(client.budget, LedgerBudget)
    return client.budget.ledger


def same(first: Layers, second: Layers) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def send(
    app: ClientApp,
    legacy: bool = False,
    kind: str = "train",
    arrays: ArrayRecord | None = None,
) -> list[Message]:
    prefix = ("fitins.parameters", "fitins.config") if legacy else ("arrays", "config")
    grid = InProcessGrid(app, 1)
    content = RecordDict(
        {
            prefix[0]: ArrayRecord([*THETA]) if arrays is None else arrays,
            prefix[1]: ConfigRecord({"step": 0, "momentum": 0.5}),
        }
    )
    nodes = grid.get_node_ids()
    messages = [Message(content, dst_node_id=n, message_type=kind) for n in nodes]
    return grid.send_and_receive(messages)
