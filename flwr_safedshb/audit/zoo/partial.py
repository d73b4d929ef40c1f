"""Models and losses that raise for some values: torch's, and others of one's own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from flwr_safedshb.audit.target_model import Batch, Subject, floats, tokens
from flwr_safedshb.audit.zoo.plain import cross_entropy
from flwr_safedshb.audit.zoo.random import ROW, between

Draw = Callable[[int, np.random.Generator], Batch]


def _halves(count: int, rng: np.random.Generator) -> Batch:
    """Draw inputs of two values, and a target between 0 and 1."""
    inputs = torch.from_numpy(rng.integers(-1, 2, size=(count, 2))).float()
    return inputs, torch.from_numpy(rng.integers(2, size=(count, 1))).float()


def _values(width: int) -> Draw:
    """Return a draw of inputs, and of targets that are real numbers."""

    def draw(count: int, rng: np.random.Generator) -> Batch:
        inputs = torch.from_numpy(rng.standard_normal((count, 6))).float()
        return inputs, torch.from_numpy(rng.standard_normal((count, width))).float()

    return draw


class CancellingProbabilities(nn.Module):
    """A probability that is NaN where dropout keeps both of two huge values."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(2, 2, bias=False), nn.Dropout(0.5), nn.Linear(2, 1)
        self.layers = nn.Sequential(*layers, nn.Sigmoid())
        with torch.no_grad():
            layers[0].weight.copy_(torch.tensor([[1.0, 3e38], [1.0, -3e38]]))
            layers[2].weight.fill_(1.0)
            layers[2].bias.zero_()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return probabilities, (k, 1)."""
        outputs: torch.Tensor = self.layers(inputs)
        return outputs


def _cancelling() -> nn.Module:
    return CancellingProbabilities().layers


def _probabilities() -> nn.Module:
    layers = nn.Linear(2, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 1)
    return nn.Sequential(*layers, nn.Sigmoid())


def _probability_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.binary_cross_entropy(outputs, targets, reduction="none").sum(1)


def _label_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Make probabilities of labels, which may be no such thing."""
    wanted = targets.to(outputs.dtype)
    return functional.binary_cross_entropy(
        outputs[:, 0].sigmoid(), wanted, reduction="none"
    )


def _log_scores() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


def _own_nll(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.nll_loss(outputs.log_softmax(1), targets, reduction="none")


def _margin(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.multi_margin_loss(outputs, targets, reduction="none")


def _gathered(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    chosen = outputs.log_softmax(1).gather(1, targets.unsqueeze(1))
    return -chosen.squeeze(1)


def _indexed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -outputs.log_softmax(1)[torch.arange(len(targets)), targets]


def _one_hot(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    hot = functional.one_hot(targets, 3)
    return -(hot * outputs.log_softmax(1)).sum(dim=1)


def _taken(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=outputs.dtype)
    return weights.index_select(0, targets) * outputs.square().sum(1)


def _scattered(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    hot = torch.zeros_like(outputs).scatter(1, targets.unsqueeze(1), 1.0)
    return (outputs - hot).square().sum(1)


def _bounded(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if not bool((outputs.detach().abs() < 1e4).all()):
        raise ValueError("outputs are too large")
    return cross_entropy(outputs, targets)


def _exits(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if bool((outputs.detach() > 30.0).any()):
        raise SystemExit("an output is above 30")
    return cross_entropy(outputs, targets)


def _divided(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    share = (6 // (targets + 1)).to(outputs.dtype)
    return outputs.square().sum(1) * share


def _gaussian_nll(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    mean, variance = outputs[:, :1], outputs[:, 1:2].square()
    return functional.gaussian_nll_loss(
        mean, targets, variance, full=True, reduction="none"
    ).squeeze(1)


def _solved(hidden: torch.Tensor) -> torch.Tensor:
    matrix = hidden.reshape(-1, 2, 3)[:, :, :2]
    found: torch.Tensor = torch.linalg.solve(matrix, hidden.reshape(-1, 2, 3)).flatten(
        1
    )
    return found


def _decomposed(hidden: torch.Tensor) -> torch.Tensor:
    matrix = hidden.reshape(-1, 2, 3)
    covariance = matrix @ matrix.mT + torch.eye(2, dtype=hidden.dtype)
    found: torch.Tensor = (torch.linalg.cholesky(covariance) @ matrix).flatten(1)
    return found


def _inverted(hidden: torch.Tensor) -> torch.Tensor:
    matrix = hidden.reshape(-1, 2, 3)
    found: torch.Tensor = (torch.linalg.pinv(matrix).mT + matrix).flatten(1)
    return found


def _eigenvalues(hidden: torch.Tensor) -> torch.Tensor:
    matrix = hidden.unsqueeze(2) * hidden.unsqueeze(1)
    found: torch.Tensor = torch.linalg.eigvalsh(matrix)
    return found


def _chosen_rows(hidden: torch.Tensor) -> torch.Tensor:
    """Look up values by what was computed, which may be no number."""
    place = (hidden.detach() * 0.5).long() + 3
    return hidden.gather(1, place)


def _sampled(hidden: torch.Tensor) -> torch.Tensor:
    image = hidden.reshape(-1, 1, 2, 3)
    grid = hidden.reshape(-1, 1, 3, 2)
    found = functional.grid_sample(image, grid, align_corners=False)
    return found.flatten(1).repeat(1, 2)


class _Lookup(nn.Module):
    """Entries of a table that is used as weights, too, and as they are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.table(inputs).mean(dim=1))
        return outputs


class _Functional(nn.Module):
    """Entries of a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(12, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = functional.embedding(inputs, self.table) + self.table[inputs]
        outputs: torch.Tensor = self.head(rows.mean(dim=1))
        return outputs


def _each_word() -> nn.Module:
    return nn.Sequential(nn.Embedding(12, 6), nn.Tanh(), nn.Linear(6, 12))


def _next_word(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return an example's mean loss over its words, where some are ignored."""
    every = functional.cross_entropy(outputs.mT, targets, reduction="none")
    return every.mean(dim=1)


def _words(count: int, rng: np.random.Generator) -> Batch:
    words = torch.from_numpy(rng.integers(12, size=(2, count, 4)))
    return words[0], words[1]


def _pixels(count: int, rng: np.random.Generator) -> Batch:
    inputs = torch.from_numpy(rng.standard_normal((count, 2, 3, 3))).float()
    return inputs, torch.from_numpy(rng.integers(3, size=(count, 3, 3)))


def _each_pixel() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(), nn.Conv2d(4, 3, 1))


def _flat_embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(12, 4), nn.Flatten(), nn.Linear(16, 3))


def _largest() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(12, 6, mode="max"), nn.Linear(6, 3))


class _Lstm(nn.Module):
    """A recurrent layer of torch, which goes one example at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 5, batch_first=True, dropout=0.5, num_layers=2)
        self.head = nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.layer(inputs)[0][:, -1])
        return outputs


WORDS = tokens(4, 12, 3)
SUBJECTS = (
    Subject("BCELoss on cancelling weights", _cancelling, nn.BCELoss(), _halves),
    Subject("BCELoss", _probabilities, nn.BCELoss(), _halves),
    Subject(
        "binary_cross_entropy",
        lambda: nn.Sequential(CancellingProbabilities()),
        _probability_loss,
        _halves,
    ),
    Subject(
        "binary_cross_entropy on labels",
        _log_scores,
        _label_loss,
        floats(6, classes=2),
    ),
    Subject("CrossEntropyLoss", _log_scores, nn.CrossEntropyLoss(), ROW),
    Subject(
        "CrossEntropyLoss, smoothed",
        _log_scores,
        nn.CrossEntropyLoss(label_smoothing=0.1),
        ROW,
    ),
    Subject(
        "CrossEntropyLoss with weights",
        _log_scores,
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0, 0.1]), reduction="none"),
        ROW,
    ),
    Subject("NLLLoss", _log_scores, nn.NLLLoss(), ROW),
    Subject("nll_loss", _log_scores, _own_nll, ROW),
    Subject("MultiMarginLoss", _log_scores, nn.MultiMarginLoss(), ROW),
    Subject("multi_margin_loss", _log_scores, _margin, ROW),
    Subject("GaussianNLL-like", _log_scores, _gaussian_nll, _values(1)),
    Subject("MSELoss", _log_scores, nn.MSELoss(), _values(3)),
    Subject("HuberLoss", _log_scores, nn.HuberLoss(), _values(3)),
    Subject("PoissonNLLLoss", _log_scores, nn.PoissonNLLLoss(), _values(3)),
    Subject("KLDivLoss", _log_scores, nn.KLDivLoss(reduction="sum"), _values(3)),
    Subject("loss that gathers", _log_scores, _gathered, ROW),
    Subject("loss that indexes", _log_scores, _indexed, ROW),
    Subject("loss with one_hot", _log_scores, _one_hot, ROW),
    Subject("loss with index_select", _log_scores, _taken, ROW),
    Subject("loss that scatters", _log_scores, _scattered, ROW),
    Subject("loss that divides by labels", _log_scores, _divided, ROW),
    Subject("loss that refuses values", _log_scores, _bounded, ROW),
    Subject("loss that exits", _log_scores, _exits, ROW),
    Subject("linalg.solve", between(_solved), cross_entropy, ROW),
    Subject("linalg.cholesky", between(_decomposed), cross_entropy, ROW),
    Subject("linalg.pinv", between(_inverted), cross_entropy, ROW),
    Subject("linalg.eigvalsh", between(_eigenvalues), cross_entropy, ROW),
    Subject("gather by values", between(_chosen_rows), cross_entropy, ROW),
    # It reads outside of its memory for some values.
    Subject("grid_sample", between(_sampled), cross_entropy, ROW, must_refuse=True),
    Subject("tied table", _Lookup, cross_entropy, tokens(4, 12, 12)),
    Subject("bare table", _Functional, cross_entropy, WORDS),
    Subject("Embedding, flattened", _flat_embedding, nn.CrossEntropyLoss(), WORDS),
    Subject("labels of words", _each_word, _next_word, _words),
    Subject(
        "labels of pixels", _each_pixel, nn.CrossEntropyLoss(ignore_index=2), _pixels
    ),
    Subject("EmbeddingBag, largest", _largest, cross_entropy, WORDS),
    Subject("LSTM", _Lstm, cross_entropy, floats(3, 4, classes=3)),
)
