"""No example has a part in what others are worth."""

import torch
from torch import nn

from flwr_safedshb.privacy.evaluation import Question, private_counts
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.randomness.noise import SeededRandomness

torch.set_num_threads(1)

COUNT = 100
PLAN = PrivacyPlan(1.0, 0.0, COUNT, COUNT, sampling="whole")


class Remembers(nn.Module):
    """Turns its answers round once it has seen a large example."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.sign = torch.ones(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(x) * self.sign
        self.sign = torch.where((x.abs() > 100).any(), -self.sign, self.sign)
        return outputs


class Draws(nn.Module):
    """Answers at random, and draws once more for a large example."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x.abs() > 100).any():
            torch.rand(1)
        outputs: torch.Tensor = self.head(x) * 0 + torch.randn(1, 2)
        return outputs


def moved(model: nn.Module, seed: int = 0) -> float:
    """Return by how much one example moves the number of right answers."""
    torch.manual_seed(seed)
    inputs = torch.randn(COUNT, 2)
    targets = model(inputs).argmax(dim=1)
    found = []
    for first in (1.0, 1000.0):
        inputs[0] = first
        torch.manual_seed(seed)
        counts = private_counts(
            (model, nn.CrossEntropyLoss()),
            (inputs, targets),
            PLAN,
            SeededRandomness(0),
            Question(10.0),
        )
        found.append(counts.correct)
    return abs(found[1] - found[0])


def test_what_an_example_leaves_in_the_model_reaches_no_other() -> None:
    assert moved(Remembers()) <= 1.0


def test_what_an_example_draws_changes_no_other() -> None:
    assert max(moved(Draws(), seed) for seed in range(5)) <= 1.0
