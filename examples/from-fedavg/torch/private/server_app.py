"""An app with the structure of Flower's PyTorch quickstart: the server."""

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from task import Net

from flwr_safedshb import SafeDSHB

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and save the model."""
    strategy = SafeDSHB(num_malicious_nodes=1, momentum=0.8, evaluate_every=30)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=context.run_config["num-server-rounds"],
    )
    torch.save(result.arrays.to_torch_state_dict(), context.run_config["model"])
