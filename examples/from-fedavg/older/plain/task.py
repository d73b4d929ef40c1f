"""The model, the data, and how an epoch is trained; made up, nothing is downloaded."""

import torch
from flwr.common import Context, NDArrays
from torch import nn
from torch.utils.data import DataLoader, random_split

CLASSES = 3


class Net(nn.Module):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.fc = nn.Linear(4 * 4 * 4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of images, (k, 1, 8, 8)."""
        x = nn.functional.max_pool2d(torch.relu(self.conv(x)), 2)
        return self.fc(x.flatten(1))


def get_weights(net: nn.Module) -> NDArrays:
    """Return the weights as a list of arrays."""
    return [value.cpu().numpy() for value in net.state_dict().values()]


def set_weights(net: nn.Module, weights: NDArrays) -> None:
    """Give the model a list of arrays as its weights."""
    pairs = zip(net.state_dict(), map(torch.tensor, weights), strict=True)
    net.load_state_dict(dict(pairs), strict=True)


def load_data(context: Context) -> tuple[DataLoader, DataLoader]:
    """Return a node's images, as Flower Datasets has them: in dicts."""
    draw = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    images = torch.randn(200, 1, 8, 8, generator=draw)
    labels = torch.randint(CLASSES, (200,), generator=draw)
    for image, label in zip(images, labels, strict=True):
        image[0, 2 * label : 2 * label + 2] += 1.5  # two bright rows
    pairs = zip(images, labels, strict=True)
    items = [{"img": image, "label": int(label)} for image, label in pairs]
    train, test = random_split(items, [0.8, 0.2], draw)
    return DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, 32)


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    """Train, and return the last loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(batch["img"]), batch["label"])
            loss.backward()
            optimizer.step()
    return loss.item()


def test(net: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Return loss and accuracy."""
    correct, loss = 0, 0.0
    with torch.no_grad():
        for batch in loader:
            logits = net(batch["img"])
            loss += nn.functional.cross_entropy(logits, batch["label"]).item()
            correct += int((logits.argmax(1) == batch["label"]).sum())
    return loss / len(loader), correct / len(loader.dataset)
