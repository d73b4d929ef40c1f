"""An app of the older kind: the clients are NumPyClients."""

from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import Context, NDArrays, Scalar
from task import Net, get_weights, load_data, set_weights, test
from task import train as train_fn
from torch.utils.data import DataLoader


class FlowerClient(NumPyClient):
    """Trains and evaluates the model on local data."""

    def __init__(self, model: Net, train: DataLoader, val: DataLoader) -> None:
        self.model, self.trainloader, self.valloader = model, train, val

    def fit(self, parameters: NDArrays, config: dict[str, Scalar]) -> tuple:
        """Train for an epoch."""
        set_weights(self.model, parameters)
        train_fn(self.model, self.trainloader, epochs=1, lr=0.1)
        return get_weights(self.model), len(self.trainloader.dataset), {}

    def evaluate(self, parameters: NDArrays, config: dict[str, Scalar]) -> tuple:
        """Evaluate the model."""
        set_weights(self.model, parameters)
        loss, accuracy = test(self.model, self.valloader)
        return loss, len(self.valloader.dataset), {"accuracy": accuracy}


def client_fn(context: Context) -> Client:
    """Make the client of a node."""
    train, val = load_data(context)
    client = FlowerClient(Net(), train, val)
    return client.to_client()


app = ClientApp(client_fn=client_fn)
