"""The model, and how a node reads its examples."""

from functools import cache

import numpy as np
import torch
from flwr.app import Context

FEATURES, CLASSES = 8, 2


def make_model() -> torch.nn.Module:
    """Return the model before training."""
    return torch.nn.Linear(FEATURES, CLASSES)


def load_data(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a node's inputs, (m, 8) float32, and labels, (m,) int64.

    A node whose config names a file with `data` reads it. In a simulation they are
    made up.
    """
    if "data" in context.node_config:
        return read_examples(str(context.node_config["data"]))
    return make_examples(int(context.node_config["partition-id"]))


@cache
def read_examples(path: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Read an .npz file of `inputs` and `labels`."""
    with np.load(path, allow_pickle=False) as file:
        return torch.from_numpy(file["inputs"]), torch.from_numpy(file["labels"])


@cache
def make_examples(node: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make up examples: the sum of the first two features decides the label."""
    inputs = torch.randn(500, FEATURES, generator=torch.Generator().manual_seed(node))
    return inputs, (inputs[:, 0] + inputs[:, 1] > 0).long()
