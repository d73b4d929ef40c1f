"""Models for simulations, and how good they are."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from simulations.data import Examples


class LogisticRegression(nn.Linear):
    """Logistic regression from zero; d = num_features + 1."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


def logistic_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Binary cross entropy of each example, (k,)."""
    logits = outputs.squeeze(1)
    return binary_cross_entropy_with_logits(logits, targets, reduction="none")


def evaluate(model: nn.Module, examples: Examples) -> dict[str, float]:
    """Return the mean loss and the accuracy on examples that are not private."""
    inputs, targets = examples
    with torch.no_grad():
        outputs = model(inputs)
        right = (outputs.squeeze(1) > 0).float() == targets
        loss = logistic_loss(outputs, targets)
    return {"loss": float(loss.mean()), "accuracy": float(right.float().mean())}
