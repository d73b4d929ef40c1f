"""Models for simulations, their loss, and how good they are."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from simulations.data import Examples

# Elements of the inputs that are evaluated at a time: few, so that what lies between
# the layers of a network stays in the cache (2.6 times faster than 2**22 for the CNN).
_MAX_ELEMENTS = 2**18
# Adversaries want the direction of an optimum, for which few steps are enough.
_OPTIMUM_STEPS = 100


class LogisticRegression(nn.Sequential):
    """Logistic regression from zero; d = (num_features + 1) num_outputs."""

    def __init__(self, num_features: int, num_outputs: int = 1) -> None:
        linear = nn.Linear(num_features, num_outputs)
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
        super().__init__(nn.Flatten(), linear)


class MLP(nn.Sequential):
    """Fully connected layers with ReLU between them."""

    def __init__(
        self, num_features: int, num_outputs: int, hidden: Sequence[int]
    ) -> None:
        if not all(isinstance(width, int) and width > 0 for width in hidden):
            raise ValueError(f"hidden={hidden} must be a list of whole numbers above 0")
        layers: list[nn.Module] = [nn.Flatten()]
        for width in hidden:
            layers += [nn.Linear(num_features, width), nn.ReLU()]
            num_features = width
        super().__init__(*layers, nn.Linear(num_features, num_outputs))


class CNN(nn.Sequential):
    """Three convolutions that halve the image, each with GroupNorm, for any image.

    GroupNorm, unlike BatchNorm, mixes no examples. For one channel and ten outputs
    d = 26,090, whatever the size of the image.
    """

    def __init__(self, input_shape: Sequence[int], num_outputs: int) -> None:
        if len(input_shape) != 3:
            raise ValueError(
                f"input_shape={tuple(input_shape)} must be (channels, height, width); "
                "use model=logistic or model=mlp for other data"
            )
        layers: list[nn.Module] = []
        channels = input_shape[0]
        for width in (16, 32, 64):
            layers += [
                nn.Conv2d(channels, width, kernel_size=3, stride=2, padding=1),
                nn.GroupNorm(width // 8, width),
                nn.ReLU(),
            ]
            channels = width
        layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten()]
        super().__init__(*layers, nn.Linear(4 * channels, num_outputs))


def build_model(
    make: Callable[..., nn.Module],
    input_shape: Sequence[int],
    num_classes: int,
    seed: int,
) -> nn.Module:
    """Make a model that fits the data.

    Parameters
    ----------
    make : callable
        Gets those of ``input_shape``, ``num_features`` (of a flat input),
        ``num_outputs`` (one for two classes) and ``num_classes`` that it names and that
        are not set; anything else it needs must be set already, as in
        ``functools.partial``.
    input_shape : sequence of int
        Of one input.
    num_classes : int
    seed : int
        Of the initial weights.
    """
    facts = {
        "input_shape": tuple(input_shape),
        "num_features": prod(input_shape),
        "num_outputs": 1 if num_classes == 2 else num_classes,
        "num_classes": num_classes,
    }
    preset = getattr(make, "keywords", {})
    named = inspect.signature(make).parameters.keys() - preset.keys()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(**{name: facts[name] for name in facts.keys() & named})


def classification_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each example, (k,).

    Parameters
    ----------
    outputs : Tensor, shape (k, 1) or (k, num_classes)
        The logit of class 1 of two, or one logit for each class.
    labels : Tensor of whole numbers, shape (k,)
    """
    if outputs.shape[1] == 1:
        return functional.binary_cross_entropy_with_logits(
            outputs.squeeze(1), labels.to(outputs.dtype), reduction="none"
        )
    return functional.cross_entropy(outputs, labels.long(), reduction="none")


def loss_and_targets(
    model: nn.Module, examples: Examples
) -> tuple[nn.Module, torch.Tensor]:
    """Return the same loss as torch has it, and labels as that takes them.

    Of torch's own it is known that they do not mix examples, and a step takes less.
    """
    inputs, labels = examples
    with torch.no_grad():
        outputs = copy.deepcopy(model).eval()(inputs[:1])
    if outputs.shape[1] == 1:
        return nn.BCEWithLogitsLoss(), labels.to(outputs.dtype).unsqueeze(1)
    return nn.CrossEntropyLoss(), labels.long()


def evaluate_model(model: nn.Module, examples: Examples) -> dict[str, float]:
    """Return the mean loss and the accuracy on examples that are not private."""
    losses, right = _measured(model, examples)
    return {"loss": float(losses.mean()), "accuracy": float(right.float().mean())}


def training_loss(
    model: nn.Module, training: Examples, sizes: Sequence[int], weight_decay: float
) -> float:
    """Return the loss that the nodes minimise, which the simulation alone can see.

    That is the average over nodes of their mean losses, plus (lambda/2) ||theta||^2.

    Parameters
    ----------
    model : nn.Module
    training : (inputs, labels)
        The examples of all nodes in a row.
    sizes : sequence of int
        How many each node holds.
    weight_decay : float
        lambda.
    """
    losses, _ = _measured(model, training)
    means = [part.mean() for part in torch.split(losses, list(sizes))]
    trained = (p.detach() for p in model.parameters() if p.requires_grad)
    square = sum(float(p.double().square().sum()) for p in trained)
    return float(torch.stack(means).mean()) + weight_decay / 2 * square


def loss_gradient(
    model: nn.Module, shards: Sequence[Examples], weight_decay: float
) -> NDArray[np.float32]:
    """Return the gradient, (d,), of the mean over shards of their mean losses."""
    trained = [p for p in model.parameters() if p.requires_grad]
    total = weight_decay * nn.utils.parameters_to_vector(trained).detach().double()
    for inputs, labels in shards:
        loss = classification_loss(model(inputs), labels).mean() / len(shards)
        parts = torch.autograd.grad(loss, trained)
        total += nn.utils.parameters_to_vector(parts).double()
    return total.float().numpy()


def find_way_to_optimum(
    model: nn.Module, shards: Sequence[Examples], weight_decay: float
) -> NDArray[np.float32]:
    """Return where the optimum of that loss is, (d,), as seen from a model.

    Of a loss that is not convex, where L-BFGS ends.
    """
    model = copy.deepcopy(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    first = nn.utils.parameters_to_vector(trained).detach().clone()
    search = torch.optim.LBFGS(
        trained, max_iter=_OPTIMUM_STEPS, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        search.zero_grad()
        losses = [classification_loss(model(x), labels).mean() for x, labels in shards]
        square = nn.utils.parameters_to_vector(trained).square().sum()
        total = torch.stack(losses).mean() + weight_decay / 2 * square
        total.backward()  # type: ignore[no-untyped-call]
        return total

    search.step(closure)  # type: ignore[no-untyped-call]
    found = nn.utils.parameters_to_vector(trained).detach() - first
    return found.numpy()


@torch.no_grad()
def _measured(
    model: nn.Module, examples: Examples
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each example's loss in float64, and whether it is classified rightly."""
    inputs, labels = examples
    size = max(1, _MAX_ELEMENTS // max(1, prod(inputs.shape[1:])))
    was_training = model.training
    model.eval()
    try:
        outputs = torch.cat([model(part) for part in torch.split(inputs, size)])
    finally:
        model.train(was_training)
    if outputs.shape[1] == 1:
        classes = (outputs.squeeze(1) > 0).long()
    else:
        classes = outputs.argmax(dim=1)
    return classification_loss(outputs.double(), labels), classes == labels.long()
