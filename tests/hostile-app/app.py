"""A federation for tests: node 3 is hostile, and node 0 can be held up in a step.

The loss is linear in the model, so a node's gradients, and with them its momentum,
follow from the seed alone.
"""

import time
from pathlib import Path
from typing import cast

import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch.utils.data import Dataset

from flwr_safedshb.app import client_app
from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.privacy.randomness.noise import SeededRandomness
from flwr_safedshb.strategy import SafeDSHB
from tests.guard import HANGS
from tests.linear import BETA, PLAN, ROUNDS, SEED, data
from tests.replies import KINDS

# What node 3 sends, step by step.
SENT = ["nan", "shape (1,)", "bare pickle", "huge"]


class Held(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Examples that cannot be read while there is a file `hold`."""

    def __init__(self, partition: int, hold: Path) -> None:
        self.inputs = data(partition)
        self.hold = hold if partition == 0 else None

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        while self.hold is not None and self.hold.exists():
            time.sleep(0.1)
        return self.inputs[index], torch.tensor(0.0)


def outputs_as_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.squeeze(1)


def client_fn(context: Context) -> SafeDSHBClient:
    partition = int(context.node_config["partition-id"])
    return SafeDSHBClient(
        torch.nn.Linear(3, 1, bias=False),
        outputs_as_loss,
        Held(partition, Path(str(context.run_config["folder"])) / "hold"),
        PLAN,
        context,
        like=(torch.zeros(3), 0.0),
        randomness=SeededRandomness(SEED),
    )


honest = client_app(client_fn)
client = ClientApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    reply = honest(message, context)
    if context.node_config["partition-id"] != 3:
        return reply
    step = cast(int, message.content.config_records["config"]["step"])
    layers = reply.content.array_records["arrays"].to_numpy_ndarrays()
    return Message(KINDS[SENT[step]].make(layers), reply_to=message)


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    strategy = SafeDSHB(
        num_malicious_nodes=1,
        momentum=BETA,
        min_available_nodes=4,
        node_timeout=HANGS,
        checkpoint=Path(str(context.run_config["folder"])) / "run.npz",
    )
    initial = ArrayRecord({"weight": torch.zeros(1, 3)})
    strategy.start(grid, initial, num_rounds=ROUNDS, timeout=90)
