"""The product's client on the chaos suite's problem; it can be held up at its data."""

from __future__ import annotations

import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from torch.utils.data import Dataset

from flwr_safedshb.app import client_app
from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.privacy.randomness.noise import SeededRandomness
from simulations.chaos.app import hold, read_order
from simulations.chaos.problem import DELTA, DIMENSION, MAX_EPSILON, PLAN, make_data


class HeldDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A node's data; to read them, after the charge, may take long."""

    def __init__(self, context: Context, step: int) -> None:
        partition = int(context.node_config["partition-id"])
        values = make_data(partition, int(context.run_config["seed"]))
        self.targets = torch.from_numpy(values)
        self.context, self.step = context, step

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if read_order(self.context, self.step) == "hold-after":
            hold(self.context, self.step)
        return torch.ones(1), self.targets[index]


def squared_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return half the squared distance; its gradient is model less example."""
    return 0.5 * ((outputs - targets) ** 2).sum(dim=1)


def make_client(step: int) -> ClientApp:
    """Return the client of a step."""

    def client_fn(context: Context) -> SafeDSHBClient:
        return SafeDSHBClient(
            torch.nn.Linear(1, DIMENSION, bias=False),
            squared_loss,
            HeldDataset(context, step),
            PLAN,
            context,
            like=(torch.ones(1), torch.zeros(DIMENSION)),
            max_epsilon=MAX_EPSILON,
            delta=DELTA,
            randomness=SeededRandomness(int(context.run_config["seed"])),
        )

    return client_app(client_fn)
