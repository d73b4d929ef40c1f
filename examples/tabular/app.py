"""Hospitals of different sizes predict a rare outcome from tables with gaps.

A node whose config names a CSV file with `data` reads it; in a simulation the tables
are made up. Each node reaches the same epsilon, whatever the number of its rows.
"""

import tempfile
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from table import FEATURES, make_table, read_table

from flwr_safedshb import (
    PrivacyTarget,
    PrivateEvaluation,
    SafeDSHB,
    SafeDSHBClient,
    SeededRandomness,
    client_app,
    trained_arrays,
)

# Of the protocol: about one patient in seven is readmitted.
WEIGHTS = torch.tensor([1.0, 6.0]) / 3.5
ROWS = (1200, 1600, 2000, 2600, 3400, 5000)  # of the sites of a simulation
HELD_OUT = 3  # a third of the rows measures the model, and does not train it


def make_model() -> torch.nn.Module:
    """Return a logistic regression that starts at zero."""
    model = torch.nn.Linear(FEATURES, 2)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    return model


def weighted_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of each row, (m,); a rare one counts for more."""
    cross_entropy = torch.nn.functional.cross_entropy
    return cross_entropy(outputs, labels, weight=WEIGHTS, reduction="none")


def load_table(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a node."""
    if "data" in context.node_config:
        return read_table(Path(str(context.node_config["data"])))
    site = int(context.node_config["partition-id"])
    path = Path(tempfile.gettempdir(), f"safedshb-tabular-{site}.csv")
    make_table(path, site, ROWS[site % len(ROWS)])
    return read_table(path)


def client_fn(context: Context) -> SafeDSHBClient:
    """Make the client of a node."""
    inputs, labels = load_table(context)
    config = context.run_config
    rounds = int(config["num-rounds"])
    target = PrivacyTarget(
        float(config["epsilon"]), float(config["delta"]), rounds, evaluations=1
    )
    made_up = "data" not in context.node_config
    return SafeDSHBClient(
        make_model(),
        weighted_loss,
        (inputs, labels),
        target,
        context,
        evaluation=PrivateEvaluation(held_out=len(labels) // HELD_OUT, num_classes=2),
        randomness=SeededRandomness(0) if made_up else None,
        node_keys=("data",),
    )


client = client_app(client_fn)
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train against one hostile site, and print what the model is worth."""
    rounds = int(context.run_config["num-rounds"])
    strategy = SafeDSHB(
        num_malicious_nodes=1,
        momentum=0.8,
        server_learning_rate=4.0,
        evaluate_every=rounds,
        evaluate_per_class=True,
    )
    result = strategy.start(grid, trained_arrays(make_model()), num_rounds=rounds)
    found = result.evaluate_metrics_clientapp[rounds]
    for name, label in (("sensitivity", 1), ("specificity", 0)):
        figure, low, high = (
            found[f"median-node-class-accuracy{end}"][label]
            for end in ("", "-low", "-high")
        )
        print(f"{name} {figure:.2f}, 95 % interval {low:.2f} to {high:.2f}")
