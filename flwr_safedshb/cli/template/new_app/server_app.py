"""The server's part: how the nodes' messages become a model."""

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flwr_safedshb import SafeDSHB, trained_arrays
from new_app.task import make_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, ask the nodes how good the model is, and save it."""
    config = context.run_config
    rounds = int(config["num-server-rounds"])
    strategy = SafeDSHB(
        num_malicious_nodes=int(config["num-malicious-nodes"]),
        min_available_nodes=int(config["num-nodes"]),
        momentum=0.8,
        server_learning_rate=1.0,
        evaluate_every=rounds,
    )
    result = strategy.start(grid, trained_arrays(make_model()), num_rounds=rounds)
    found = result.evaluate_metrics_clientapp[rounds]
    low, high = (found[f"median-node-accuracy-{end}"] for end in ("low", "high"))
    print(f"accuracy of the median node: {found['median-node-accuracy']:.2f}")
    print(f"95 % interval, whatever hostile nodes say: {low:.2f} to {high:.2f}")
    torch.save(result.arrays.to_torch_state_dict(), str(config["model"]))
