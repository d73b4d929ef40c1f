"""A table with rare labels, several of them for each row: what to write for that.

The rows are made up. One of four labels is true for about one row in twenty, so the
loss weighs its true ones more; the weights are set beforehand and known to all, for
counts of a node's own labels would be private.
"""

import numpy as np
import torch
from flwr.app import Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from torch import nn

from flwr_safedshb import (
    PrivacyPlan,
    SafeDSHB,
    SafeDSHBClient,
    SeededRandomness,
    client_app,
    trained_arrays,
)

FEATURES, LABELS = 10, 4
RARE = torch.tensor([8.0, 4.0, 1.0, 1.0])


def make_model() -> nn.Module:
    """Return one logit for each label."""
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, LABELS))


def load_data(part: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of a node, (300, 10) and (300, 4)."""
    rng = np.random.default_rng([1, part])
    rows = rng.normal(size=(300, FEATURES))
    truth = np.random.default_rng(0).normal(size=(FEATURES, LABELS))
    limits = np.array([4.0, 3.0, 0.0, 0.0])
    return rows, (rows @ truth > limits).astype(float)


def client_fn(context: Context) -> SafeDSHBClient:
    """Make the client of a node."""
    rows, labels = load_data(int(context.node_config["partition-id"]))
    plan = PrivacyPlan(1.0, 1.0, batch_size=50, num_examples=len(rows))
    loss = nn.BCEWithLogitsLoss(pos_weight=RARE)
    noise = None if "state-dir" in context.node_config else SeededRandomness(0)
    more = {"randomness": noise, "delta": 1e-4}
    return SafeDSHBClient(make_model(), loss, (rows, labels), plan, context, **more)


def evaluate(server_round: int, arrays: object) -> MetricRecord:
    """Return, for each label, the mean of its true and its false rows' accuracy."""
    model = make_model()
    model.load_state_dict(arrays.to_torch_state_dict())
    rows, labels = load_data(1000)
    with torch.no_grad():
        said = model(torch.from_numpy(rows).float()).numpy() > 0
    true, false = labels == 1, labels == 0
    right = [(said & true).sum(0) / true.sum(0), (~said & false).sum(0) / false.sum(0)]
    balanced = np.mean(right, axis=0)
    return MetricRecord({f"balanced-{i}": float(b) for i, b in enumerate(balanced)})


client = client_app(client_fn)
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train against one malicious node."""
    strategy = SafeDSHB(num_malicious_nodes=1, momentum=0.9, server_learning_rate=2.0)
    rounds = int(context.run_config["num-rounds"])
    initial = trained_arrays(make_model())
    result = strategy.start(grid, initial, rounds, evaluate_fn=evaluate)
    print(dict(result.evaluate_metrics_serverapp[rounds]))
