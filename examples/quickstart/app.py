"""Flower's usual two apps; Safe-DSHB is the strategy, the client and the target."""

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from sklearn.datasets import load_breast_cancer

import flwr_safedshb as safe

# What each of the 30 features is at most, by public knowledge: they become -1 to 1.
MOST = [30, 40, 200, 3000, 0.2, 0.4, 0.5, 0.25, 0.4, 0.1, 3, 5, 25, 600, 0.05, 0.15]
MOST += [0.4, 0.06, 0.1, 0.03, 40, 50, 300, 5000, 0.25, 1.1, 1.3, 0.3, 0.7, 0.25]


def client_fn(context: Context) -> safe.SafeDSHBClient:
    """Make the client of a node, which holds every fifth example."""
    features, labels = map(torch.tensor, load_breast_cancer(return_X_y=True))
    part = slice(int(context.node_config["partition-id"]), None, 5)
    scaled = 2 * torch.log1p(features[part]) / torch.log1p(torch.tensor(MOST)) - 1
    rounds = int(context.run_config["num-rounds"])
    target = safe.PrivacyTarget(epsilon=5.0, delta=1e-4, steps=rounds, evaluations=1)
    deployed = "state-dir" in context.node_config  # else nothing keeps the budget
    more = {"randomness": None if deployed else safe.SeededRandomness(0)}
    more["evaluation"] = safe.PrivateEvaluation(held_out=30)
    model, loss = torch.nn.Linear(30, 2), torch.nn.CrossEntropyLoss()
    data = scaled.float(), labels[part]
    return safe.SafeDSHBClient(model, loss, data, target, context, **more)


client, server = safe.client_app(client_fn), ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train against one malicious node of five, and evaluate privately at the end."""
    rounds = int(context.run_config["num-rounds"])
    more = {"min_available_nodes": 5, "evaluate_every": rounds, "momentum": 0.8}
    strategy = safe.SafeDSHB(num_malicious_nodes=1, server_learning_rate=3.0, **more)
    initial = safe.trained_arrays(torch.nn.Linear(30, 2))
    result = strategy.start(grid, initial, num_rounds=rounds)
    torch.save(result.arrays.to_torch_state_dict(), "model.pt")
