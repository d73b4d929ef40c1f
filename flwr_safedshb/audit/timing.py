"""Measures whether the time of a step says something about its examples.

The server sees how long a node takes, and chooses the weights. So a step with examples
that cannot be used, or whose gradients overflow or become denormal under the server's
weights, must take the time of a step without them. Steps of all kinds take turns, so
that what else the machine does falls on all of them; what is compared are medians.
"""

from __future__ import annotations

import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from flwr_safedshb.audit.candidate import UnreadableItems
from flwr_safedshb.audit.target_model import ComposedModel
from flwr_safedshb.privacy.bad_examples import silence_log
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.datasets import ArrayExamples, Examples, ItemExamples
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.private_gradient import BatchSource, private_vector
from flwr_safedshb.privacy.randomness.noise import SecureRandomness

# How far medians may lie apart.
TOLERANCE = 0.1
CLASSES = 3


class _Residual(nn.Module):
    """A layer with a residual connection, and a weight that no layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, CLASSES)
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs + functional.relu(self.first(inputs))
        outputs: torch.Tensor = self.last(hidden @ self.weight)
        return outputs


def _lstm() -> nn.Module:
    """Return an LSTM, which goes one example at a time."""
    return ComposedModel(
        lambda model, x: model.head(model.layer(x)[0][:, -1]),
        layer=nn.LSTM(16, 32, batch_first=True),
        head=nn.Linear(32, CLASSES),
    )


def _mlp() -> nn.Module:
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, CLASSES)
    return nn.Sequential(*layers)


def _cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(8, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * 16, CLASSES)),
    )


# A model, the shape of an input, and how many examples a batch has.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "MLP": (_mlp, (64,), 32),
    "CNN": (_cnn, (8, 8, 8), 32),
    "residual": (_Residual, (64,), 32),
    "LSTM": (_lstm, (6, 16), 8),
}
# What is wrong with examples, and the weight that the server gives to an input that
# they alone have.
KINDS: dict[str, float | None] = {
    "rows of NaN": None,
    "wrong labels": None,
    "items that raise": None,
    "losses overflow": 3e38,
    "gradients overflow": 1e25,
    "outputs are denormal": 1e-41,
}


@dataclass(frozen=True)
class Timing:
    """The time of a step, by how many of its examples are bad.

    Attributes
    ----------
    model, isolation, kind : str
    usual : float
        Median seconds of a step without bad examples, under the same weights.
    one, half : float
        Median with one, and with half of them, in units of the usual.
    computed : float
        The same as the one of these that is farther from 1, of the processor's time.
    """

    model: str
    isolation: str
    kind: str
    usual: float
    one: float
    half: float
    computed: float

    @property
    def holds(self) -> bool:
        """Whether the medians are as near to each other as they should be."""
        return max(abs(self.one - 1.0), abs(self.half - 1.0)) <= TOLERANCE


class _Step:
    """One step of a model, with examples of which some are bad."""

    def __init__(self, model: str, kind: str, bad: int) -> None:
        make, shape, count = MODELS[model]
        torch.manual_seed(1)
        module, weight = make(), KINDS[kind]
        inputs, targets = torch.randn(count, *shape), torch.randint(CLASSES, (count,))
        examples: Examples
        if weight is not None:
            # The first feature, or channel, is that of bad examples alone.
            axis = 2 if model == "LSTM" else 1
            inputs.select(axis, 0).zero_()
            inputs[:bad] = 0.0
            inputs[:bad].select(axis, 0).fill_(2.0)
            with torch.no_grad():
                next(module.parameters())[:, 0] = weight
        if kind == "rows of NaN":
            inputs[:bad] = torch.nan
        if kind == "wrong labels":
            targets[:bad] = 77
        if kind == "items that raise":
            made_up = torch.zeros(shape), torch.tensor(0)
            items = UnreadableItems((inputs, targets), torch.arange(count) >= bad)
            examples = ItemExamples(items, like=made_up)
        else:
            examples = ArrayExamples(inputs, targets)
        plan = PrivacyPlan(1.0, 1.0, count, count)
        self._gradients = ClippedGradients(module, nn.CrossEntropyLoss(), 1.0)
        self._draw = BatchSource(examples, plan, SecureRandomness())
        self.seconds: list[float] = []
        self.computed: list[float] = []
        self.run()
        self.isolation = self._gradients.isolation
        self.seconds.clear()
        self.computed.clear()

    def run(self) -> None:
        """Take a step, and note its time."""
        start, computed = time.perf_counter(), time.process_time()
        private_vector(self._gradients, self._draw)
        self.computed.append(time.process_time() - computed)
        self.seconds.append(time.perf_counter() - start)


def measure_times(model: str, steps: int) -> list[Timing]:
    """Measure steps of a model with no, one and half of the examples bad.

    Steps of every kind take turns, in random order, on one thread.
    """
    with _one_thread(), warnings.catch_warnings(action="ignore"), silence_log():
        half = MODELS[model][2] // 2
        rows = {k: [_Step(model, k, bad) for bad in (0, 1, half)] for k in KINDS}
        every = [step for row in rows.values() for step in row]
        for _ in range(steps):
            random.shuffle(every)
            for step in every:
                step.run()
    return [_compare(model, kind, row) for kind, row in rows.items()]


def _compare(model: str, kind: str, steps: Sequence[_Step]) -> Timing:
    usual, *bad = (statistics.median(step.seconds) for step in steps)
    one, half = (median / usual for median in bad)
    least, *others = (statistics.median(step.computed) for step in steps)
    computed = max((other / least for other in others), key=lambda r: abs(r - 1.0))
    return Timing(model, steps[0].isolation, kind, usual, one, half, computed)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
