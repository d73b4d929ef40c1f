"""Models and losses that raise for some values: torch's, and others of one's own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from flwr_safedshb.audit.target_model import (
    Batch,
    Between,
    ComposedModel,
    DrawExamples,
    TargetModel,
    cross_entropy,
    floats,
    tokens,
)
from flwr_safedshb.privacy.clipping.gradients import Loss

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _draw_signs(count: int, rng: np.random.Generator) -> Batch:
    """Draw inputs in {-1, 0, 1}, and a target of 0.0 or 1.0."""
    inputs = torch.from_numpy(rng.integers(-1, 2, size=(count, 2))).float()
    return inputs, torch.from_numpy(rng.integers(2, size=(count, 1))).float()


def _real_targets(width: int) -> DrawExamples:
    """Return a draw of inputs, and of targets that are real numbers."""

    def draw(count: int, rng: np.random.Generator) -> Batch:
        inputs = torch.from_numpy(rng.standard_normal((count, 6))).float()
        return inputs, torch.from_numpy(rng.standard_normal((count, width))).float()

    return draw


def _draw_words(count: int, rng: np.random.Generator) -> Batch:
    words = torch.from_numpy(rng.integers(12, size=(2, count, 4)))
    return words[0], words[1]


def _draw_pixels(count: int, rng: np.random.Generator) -> Batch:
    inputs = torch.from_numpy(rng.standard_normal((count, 2, 3, 3))).float()
    return inputs, torch.from_numpy(rng.integers(3, size=(count, 3, 3)))


ROW, WORDS = floats(6, classes=3), tokens(4, 12, 3)


def _make_cancelling() -> nn.Sequential:
    """Return a model of a probability that is NaN where dropout keeps both inputs.

    The two inputs have huge weights that cancel; the output has shape (k, 1).
    """
    inner, outer = nn.Linear(2, 2, bias=False), nn.Linear(2, 1)
    with torch.no_grad():
        inner.weight.copy_(torch.tensor([[1.0, 3e38], [1.0, -3e38]]))
        outer.weight.fill_(1.0)
        outer.bias.zero_()
    return nn.Sequential(inner, nn.Dropout(0.5), outer, nn.Sigmoid())


def _probabilities() -> nn.Module:
    layers = nn.Linear(2, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 1)
    return nn.Sequential(*layers, nn.Sigmoid())


def _probability_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.binary_cross_entropy(outputs, targets, reduction="none").sum(1)


def _label_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Take labels for probabilities, which they may not be."""
    wanted = targets.to(outputs.dtype)
    return functional.binary_cross_entropy(
        outputs[:, 0].sigmoid(), wanted, reduction="none"
    )


def _make_scores() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


def _gather_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -outputs.log_softmax(1).gather(1, targets.unsqueeze(1)).squeeze(1)


def _one_hot_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -(functional.one_hot(targets, 3) * outputs.log_softmax(1)).sum(dim=1)


def _select_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=outputs.dtype)
    return weights.index_select(0, targets) * outputs.square().sum(1)


def _scatter_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    hot = torch.zeros_like(outputs).scatter(1, targets.unsqueeze(1), 1.0)
    return (outputs - hot).square().sum(1)


def _divide_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.square().sum(1) * (6 // (targets + 1)).to(outputs.dtype)


def _refusing_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if not bool((outputs.detach().abs() < 1e4).all()):
        raise ValueError("outputs are too large")
    return cross_entropy(outputs, targets)


def _exiting_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if bool((outputs.detach() > 30.0).any()):
        raise SystemExit("an output is above 30")
    return cross_entropy(outputs, targets)


def _gaussian_nll(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    mean, variance = outputs[:, :1], outputs[:, 1:2].square()
    return functional.gaussian_nll_loss(
        mean, targets, variance, full=True, reduction="none"
    ).squeeze(1)


def _word_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return an example's mean loss over its words, some of which are ignored."""
    losses = functional.cross_entropy(outputs.mT, targets, reduction="none")
    return losses.mean(dim=1)


# Losses on three scores: of a class, and of real numbers.
_CLASS_LOSSES: dict[str, Loss] = {
    "CrossEntropyLoss": nn.CrossEntropyLoss(),
    "CrossEntropyLoss, smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
    "CrossEntropyLoss with weights": nn.CrossEntropyLoss(
        weight=torch.tensor([1.0, 9.0, 0.1]), reduction="none"
    ),
    "NLLLoss": nn.NLLLoss(),
    "nll_loss": lambda outputs, targets: functional.nll_loss(
        outputs.log_softmax(1), targets, reduction="none"
    ),
    "MultiMarginLoss": nn.MultiMarginLoss(),
    "multi_margin_loss": lambda outputs, targets: functional.multi_margin_loss(
        outputs, targets, reduction="none"
    ),
    "loss that gathers": _gather_loss,
    "loss that indexes": lambda outputs, targets: (
        -outputs.log_softmax(1)[torch.arange(len(targets)), targets]
    ),
    "loss with one_hot": _one_hot_loss,
    "loss with index_select": _select_loss,
    "loss that scatters": _scatter_loss,
    "loss that divides by labels": _divide_loss,
    "loss that refuses values": _refusing_loss,
    "loss that exits": _exiting_loss,
}
_VALUE_LOSSES: dict[str, Loss] = {
    "MSELoss": nn.MSELoss(),
    "HuberLoss": nn.HuberLoss(),
    "PoissonNLLLoss": nn.PoissonNLLLoss(),
    "KLDivLoss": nn.KLDivLoss(reduction="sum"),
}


def _add_solution(hidden: torch.Tensor) -> torch.Tensor:
    matrix = hidden.reshape(-1, 2, 3)
    solution: torch.Tensor = torch.linalg.solve(matrix[:, :, :2], matrix)
    return solution.flatten(1)


def _multiply_cholesky(hidden: torch.Tensor) -> torch.Tensor:
    matrix = hidden.reshape(-1, 2, 3)
    covariance = matrix @ matrix.mT + torch.eye(2, dtype=hidden.dtype)
    product: torch.Tensor = torch.linalg.cholesky(covariance) @ matrix
    return product.flatten(1)


def _add_pseudoinverse(hidden: torch.Tensor) -> torch.Tensor:
    matrix = hidden.reshape(-1, 2, 3)
    total: torch.Tensor = torch.linalg.pinv(matrix).mT + matrix
    return total.flatten(1)


def _find_eigenvalues(hidden: torch.Tensor) -> torch.Tensor:
    values: torch.Tensor = torch.linalg.eigvalsh(
        hidden.unsqueeze(2) * hidden.unsqueeze(1)
    )
    return values


def _sample_grid(hidden: torch.Tensor) -> torch.Tensor:
    image, grid = hidden.reshape(-1, 1, 2, 3), hidden.reshape(-1, 1, 3, 2)
    sampled = functional.grid_sample(image, grid, align_corners=False)
    return sampled.flatten(1).repeat(1, 2)


# Functions between two layers; the index that one computes may be no number.
_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linalg.solve": _add_solution,
    "linalg.cholesky": _multiply_cholesky,
    "linalg.pinv": _add_pseudoinverse,
    "linalg.eigvalsh": _find_eigenvalues,
    "gather by values": lambda x: x.gather(1, (x.detach() * 0.5).long() + 3),
}


class _TiedTable(nn.Module):
    """A table that is also the head's weights: some entries sparse, all dense."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.table(inputs).mean(dim=1))
        return outputs


class _BareTable(nn.Module):
    """A bare parameter used as a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(12, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = functional.embedding(inputs, self.table) + self.table[inputs]
        outputs: torch.Tensor = self.head(rows.mean(dim=1))
        return outputs


def _lstm() -> nn.Module:
    """Return a recurrent layer of torch, which goes one example at a time."""
    return ComposedModel(
        lambda model, x: model.head(model.layer(x)[0][:, -1]),
        layer=nn.LSTM(4, 5, batch_first=True, dropout=0.5, num_layers=2),
        head=nn.Linear(5, 3),
    )


def _insert(name: str) -> TargetModel:
    return TargetModel(name, lambda: Between(_FUNCTIONS[name]), ROW)


MODELS = (
    TargetModel(
        "BCELoss on cancelling weights", _make_cancelling, _draw_signs, nn.BCELoss()
    ),
    TargetModel("BCELoss", _probabilities, _draw_signs, nn.BCELoss()),
    TargetModel(
        "binary_cross_entropy",
        lambda: ComposedModel(
            lambda model, x: model.inner(x), inner=_make_cancelling()
        ),
        _draw_signs,
        _probability_loss,
    ),
    TargetModel(
        "binary_cross_entropy on labels",
        _make_scores,
        floats(6, classes=2),
        _label_loss,
    ),
    *(TargetModel(n, _make_scores, ROW, loss) for n, loss in _CLASS_LOSSES.items()),
    *(
        TargetModel(name, _make_scores, _real_targets(3), loss)
        for name, loss in _VALUE_LOSSES.items()
    ),
    TargetModel("GaussianNLL-like", _make_scores, _real_targets(1), _gaussian_nll),
    *map(_insert, _FUNCTIONS),
    # It reads outside of its memory for some values.
    TargetModel("grid_sample", lambda: Between(_sample_grid), ROW, must_refuse=True),
    TargetModel("tied table", _TiedTable, tokens(4, 12, 12)),
    TargetModel("bare table", _BareTable, WORDS),
    TargetModel(
        "Embedding, flattened",
        lambda: nn.Sequential(nn.Embedding(12, 4), nn.Flatten(), nn.Linear(16, 3)),
        WORDS,
        nn.CrossEntropyLoss(),
    ),
    TargetModel(
        "labels of words",
        lambda: nn.Sequential(nn.Embedding(12, 6), nn.Tanh(), nn.Linear(6, 12)),
        _draw_words,
        _word_loss,
    ),
    TargetModel(
        "labels of pixels",
        lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(), nn.Conv2d(4, 3, 1)),
        _draw_pixels,
        nn.CrossEntropyLoss(ignore_index=2),
    ),
    TargetModel(
        "EmbeddingBag, largest",
        lambda: nn.Sequential(nn.EmbeddingBag(12, 6, mode="max"), nn.Linear(6, 3)),
        WORDS,
    ),
    TargetModel("LSTM", _lstm, floats(3, 4, classes=3)),
)
