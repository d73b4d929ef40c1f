"""The node's part: its model, its data, and the privacy of its examples."""

import torch
from flwr.app import Context

from flwr_safedshb import (
    PrivacyTarget,
    PrivateEvaluation,
    SafeDSHBClient,
    SeededRandomness,
    client_app,
)
from new_app.task import load_data, make_model


def client_fn(context: Context) -> SafeDSHBClient:
    """Make the client of a node."""
    config = context.run_config
    target = PrivacyTarget(
        epsilon=float(config["epsilon"]),
        delta=float(config["delta"]),
        steps=int(config["num-server-rounds"]),
        evaluations=1,
    )
    # Noise with a seed protects nobody: it is for made-up data alone.
    made_up = "data" not in context.node_config
    return SafeDSHBClient(
        make_model(),
        torch.nn.CrossEntropyLoss(),
        load_data(context),
        target,
        context,
        evaluation=PrivateEvaluation(held_out=100),  # these examples do not train
        randomness=SeededRandomness(0) if made_up else None,
        node_keys=("data",),
    )


app = client_app(client_fn)
