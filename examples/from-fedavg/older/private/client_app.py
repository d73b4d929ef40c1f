"""An app of the older kind: the clients are NumPyClients."""

import torch
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.common import Context, NDArrays, Scalar
from task import Net, load_data, set_weights, test
from torch.nn import CrossEntropyLoss

from flwr_safedshb import PrivacyPlan, SafeDSHBClient, SeededRandomness


class FlowerClient(SafeDSHBClient):
    """Trains and evaluates the model on local data."""

    def evaluate(self, parameters: NDArrays, config: dict[str, Scalar]) -> tuple:
        """Evaluate the model."""
        set_weights(self.model, parameters)
        loss, accuracy = test(self.model, self.valloader)
        return loss, len(self.valloader.dataset), {"accuracy": accuracy}


def client_fn(context: Context) -> Client:
    """Make the client of a node."""
    train, val = load_data(context)
    plan = PrivacyPlan(1.0, 1.0, batch_size=32, num_examples=len(train.dataset))
    noise = None if "state-dir" in context.node_config else SeededRandomness(0)
    more = {"target": "label", "randomness": noise, "delta": 1e-4}
    more["like"] = torch.zeros(1, 8, 8), 0  # what an example looks like
    model, loss = Net(), CrossEntropyLoss()
    client = FlowerClient(model, loss, train.dataset, plan, context, **more)
    client.valloader = val
    return client.to_client()


app = ClientApp(client_fn=client_fn)
