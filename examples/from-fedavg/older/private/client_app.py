"""An app of the older kind: the clients are NumPyClients."""

import torch
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.common import Context
from task import Net, load_data

import flwr_safedshb as safe


def client_fn(context: Context) -> Client:
    """Make the client of a node."""
    train, val = (loader.dataset for loader in load_data(context))
    privacy = safe.PrivacyTarget(epsilon=3.0, delta=1e-5, steps=60, evaluations=2)
    loss, shape = torch.nn.CrossEntropyLoss(), (torch.zeros(1, 8, 8), 0)
    noise = None if "state-dir" in context.node_config else safe.SeededRandomness(0)
    more = {"target": "label", "like": shape, "randomness": noise}
    more["evaluation"] = safe.PrivateEvaluation(5.0, held_out=len(val))
    model, data = Net(), train + val
    client = safe.SafeDSHBClient(model, loss, data, privacy, context, **more)
    return client.to_client()


app = ClientApp(client_fn=client_fn)
