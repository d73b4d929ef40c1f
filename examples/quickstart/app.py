"""Flower's usual two apps; Safe-DSHB is the strategy, the client and the plan."""

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from sklearn.datasets import load_breast_cancer

from flwr_safedshb.app import client_app
from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.randomness.noise import SecureRandomness, SeededRandomness
from flwr_safedshb.strategy import SafeDSHB


def client_fn(context: Context) -> SafeDSHBClient:
    """Make the client of a node, which holds every fifth example."""
    features, labels = map(torch.tensor, load_breast_cancer(return_X_y=True))
    part = slice(int(context.node_config["partition-id"]), None, 5)
    mine = torch.log1p(features[part]).float(), labels[part]
    plan = PrivacyPlan(1.0, 1.0, batch_size=16, num_examples=len(mine[1]))
    deployed = "state-dir" in context.node_config  # else nothing keeps the budget
    noise = SecureRandomness() if deployed else SeededRandomness(0)
    model, loss = torch.nn.Linear(30, 2), torch.nn.CrossEntropyLoss()
    return SafeDSHBClient(model, loss, mine, plan, context, randomness=noise)


client = client_app(client_fn)
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train against one malicious node of five."""
    strategy = SafeDSHB(num_malicious_nodes=1, momentum=0.9, min_available_nodes=5)
    initial = ArrayRecord(torch.nn.Linear(30, 2).state_dict())
    rounds = int(context.run_config["num-rounds"])
    result = strategy.start(grid, initial, num_rounds=rounds)
    torch.save(result.arrays.to_torch_state_dict(), "model.pt")
