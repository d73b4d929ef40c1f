"""Your app: a model that nodes train on their own examples.

Change the model, how examples are read, and the plan; then `safedshb doctor` says
whether a node is fit for it. What a node does stands here, so its owner reads this file
before approving it.
"""

from functools import cache

import numpy as np
import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flwr_safedshb import PrivacyPlan, SafeDSHB, SafeDSHBClient, client_app


def make_model() -> torch.nn.Module:
    """Return the model before training: 8 features, 2 classes."""
    return torch.nn.Linear(8, 2)


@cache  # a node's worker serves all messages of a run: it reads them once
def examples_in(path: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a node's examples: float32 inputs and int64 labels."""
    with np.load(path, allow_pickle=False) as file:
        return torch.from_numpy(file["inputs"]), torch.from_numpy(file["labels"])


def client_fn(context: Context) -> SafeDSHBClient:
    """Make the client of a node from the node's own file."""
    examples = examples_in(str(context.node_config["data"]))
    plan = PrivacyPlan(
        clip_norm=1.0,
        noise_multiplier=1.0,
        batch_size=25,
        num_examples=len(examples[1]),
    )
    loss = torch.nn.CrossEntropyLoss()
    return SafeDSHBClient(
        make_model(), loss, examples, plan, context, node_keys=("data",)
    )


client = client_app(client_fn)
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train, against up to `num-malicious-nodes` adversaries among the nodes."""
    config = context.run_config
    strategy = SafeDSHB(
        num_malicious_nodes=int(config["num-malicious-nodes"]),
        momentum=float(config["momentum"]),
        min_available_nodes=int(config["num-nodes"]),
        authenticated_nodes=True,
        checkpoint=str(config["checkpoint"]) or None,
    )
    torch.manual_seed(0)  # the same model again, if the run is submitted again
    initial = ArrayRecord(make_model().state_dict())
    strategy.start(
        grid,
        initial,
        num_rounds=int(config["steps"]),
        timeout=float(config["round-seconds"]),
    )
