"""An app with the structure of Flower's PyTorch quickstart: the clients."""

import torch
from flwr.app import Context
from task import Net, load_data

import flwr_safedshb as safe


def client_fn(context: Context) -> safe.SafeDSHBClient:
    """Train the model on local data, and evaluate it on some that do not train."""
    train, test = (loader.dataset for loader in load_data(context))
    privacy = safe.PrivacyTarget(epsilon=3.0, delta=1e-5, steps=60, evaluations=2)
    loss, shape = torch.nn.CrossEntropyLoss(), (torch.zeros(1, 8, 8), 0)
    noise = None if "state-dir" in context.node_config else safe.SeededRandomness(0)
    more = {"target": "label", "like": shape, "randomness": noise}
    more["evaluation"] = safe.PrivateEvaluation(5.0, held_out=len(test))
    return safe.SafeDSHBClient(Net(), loss, train + test, privacy, context, **more)


app = safe.client_app(client_fn)
