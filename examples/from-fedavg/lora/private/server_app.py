"""A Hugging Face model with LoRA: the server."""

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from task import make_model

from flwr_safedshb import SafeDSHB

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and save the adapters."""
    strategy = SafeDSHB(num_malicious_nodes=1, momentum=0.8, evaluate_every=20)
    model = make_model()
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(trained),
        num_rounds=context.run_config["num-server-rounds"],
    )
    torch.save(result.arrays.to_torch_state_dict(), context.run_config["model"])
