"""The app of the benchmark `deployment`: one model, trained by ours or by FedAvg.

Both take one step on a batch of 25 examples. After every round the server writes the
time into the file `trace`.
"""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from flwr_safedshb.app import client_app
from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.strategy import SafeDSHB
from simulations.models import MLP, LogisticRegression

INPUTS, EXAMPLES, BATCH = 68, 500, 25
PLAN = PrivacyPlan(1.0, 1.0, BATCH, EXAMPLES)
OURS, FEDAVG = "SafeDSHB", "FedAvg"
_NODE_SECONDS = 300.0
# An MLP's inputs; with the units of its hidden layers they make its size.
_WIDE = 784


def make_model(hidden: int) -> nn.Module:
    """Return a logistic regression (69 parameters), or an MLP if there are units."""
    if hidden == 0:
        return LogisticRegression(INPUTS)
    return MLP(_WIDE, 1, (hidden, hidden))


@lru_cache(maxsize=1)
def load_task(hidden: int) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """Return the model and the examples of a node: what a process loads once."""
    inputs = torch.randn(EXAMPLES, _WIDE if hidden else INPUTS)
    return make_model(hidden), (inputs, torch.randint(2, (EXAMPLES, 1)).float())


def client_fn(context: Context) -> SafeDSHBClient:
    """Make the client of ours."""
    model, data = load_task(int(context.run_config["hidden"]))
    return SafeDSHBClient(model, nn.BCEWithLogitsLoss(), data, PLAN, context)


private = client_app(client_fn)
client = ClientApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """Take one step: private, or plain SGD that answers with weights."""
    if context.run_config["strategy"] == OURS:
        return private(message, context)
    model, (inputs, targets) = load_task(int(context.run_config["hidden"]))
    arrays = next(iter(message.content.array_records.values()))
    model.load_state_dict(arrays.to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = nn.functional.binary_cross_entropy_with_logits
    loss(model(inputs[:BATCH]), targets[:BATCH]).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    content = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": EXAMPLES}),
        }
    )
    return Message(content, reply_to=message)


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and write down when each round is over."""
    config = context.run_config
    nodes, trace = int(config["nodes"]), Path(str(config["trace"]))

    def mark(_: int, __: ArrayRecord) -> MetricRecord:
        with trace.open("a") as file:
            file.write(f"{time.time()}\n")
        return MetricRecord({"seen": 1})

    strategy = (
        SafeDSHB(
            num_malicious_nodes=(nodes - 1) // 4,
            server_learning_rate=0.1,
            min_available_nodes=nodes,
            node_timeout=_NODE_SECONDS,
        )
        if config["strategy"] == OURS
        else FedAvg(
            fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes
        )
    )
    arrays = ArrayRecord(make_model(int(config["hidden"])).state_dict())
    rounds = int(config["rounds"])
    strategy.start(grid, arrays, num_rounds=rounds, evaluate_fn=mark)
