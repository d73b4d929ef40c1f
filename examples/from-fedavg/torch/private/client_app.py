"""An app with the structure of Flower's PyTorch quickstart: the clients."""

import torch
from flwr.app import Context
from task import Net, load_data
from torch.nn import CrossEntropyLoss

from flwr_safedshb import (
    PrivacyPlan,
    PrivateEvaluation,
    SafeDSHBClient,
    SeededRandomness,
    client_app,
)


def client_fn(context: Context) -> SafeDSHBClient:
    """Train the model on local data, and evaluate it on some that do not train."""
    train, test = (loader.dataset for loader in load_data(context))
    plan = PrivacyPlan(1.0, 1.0, batch_size=32, num_examples=len(train))
    noise = None if "state-dir" in context.node_config else SeededRandomness(0)
    more = {"target": "label", "randomness": noise, "delta": 1e-4}
    more["like"] = torch.zeros(1, 8, 8), 0  # what an example looks like
    more["evaluation"] = PrivateEvaluation(noise_multiplier=5.0, held_out=len(test))
    return SafeDSHBClient(
        Net(), CrossEntropyLoss(), train + test, plan, context, **more
    )


app = client_app(client_fn)
