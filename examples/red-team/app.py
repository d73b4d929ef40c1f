"""An ordinary Flower app, and the same task for Safe-DSHB: handwritten digits."""

import logging

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits

from flwr_safedshb import PrivacyPlan, SafeDSHBClient, SeededRandomness, client_app

NODES = 10
logging.getLogger("flwr").setLevel(logging.CRITICAL)  # a table is enough
torch.set_num_threads(1)  # one is faster for so small a model
images, labels = map(torch.tensor, load_digits(return_X_y=True))
images = images.float() / 16
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
test, train = order[:297], order[297:]
loss = torch.nn.CrossEntropyLoss()

ordinary = ClientApp()


def mine(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the examples of a node."""
    part = train[int(context.node_config["partition-id"]) :: NODES]
    return images[part], labels[part]


@ordinary.train()
def train_fn(message: Message, context: Context) -> Message:
    """Train on the node's examples and send the weights, as Flower's clients do."""
    model = torch.nn.Linear(64, 10)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, targets = mine(context)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(5):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(targets)})
    arrays = ArrayRecord(model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def client_fn(context: Context) -> SafeDSHBClient:
    """Make a client of Safe-DSHB, without noise: here robustness alone is compared."""
    plan = PrivacyPlan(1.0, 0.0, batch_size=50, num_examples=len(mine(context)[1]))
    model, noise = torch.nn.Linear(64, 10), SeededRandomness(0)
    return SafeDSHBClient(model, loss, mine(context), plan, context, randomness=noise)


private = client_app(client_fn)


def initial() -> ArrayRecord:
    """Return the model to start from."""
    return ArrayRecord({"weight": torch.zeros(10, 64), "bias": torch.zeros(10)})


def accuracy(arrays: ArrayRecord) -> float:
    """Return the share of the test images that a model gets right."""
    model = torch.nn.Linear(64, 10)
    model.load_state_dict(arrays.to_torch_state_dict())
    return float((model(images[test]).argmax(1) == labels[test]).float().mean())
