"""Measure whether the time of a step depends on its examples (timing side channel).

The server sees how long a node takes, and chooses the weights. So a step with examples
that cannot be used, or whose gradients overflow or become denormal under the server's
weights, must take as long as a step without them. Steps of all kinds are interleaved in
random order, so that other load on the machine affects all of them, and medians are
compared.
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

# The largest relative difference between medians that counts as none.
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
    """Return an LSTM, whose gradients are computed one example at a time."""
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


# A model's constructor, the shape of an input, and the batch size.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "MLP": (_mlp, (64,), 32),
    "CNN": (_cnn, (8, 8, 8), 32),
    "residual": (_Residual, (64,), 32),
    "LSTM": (_lstm, (6, 16), 8),
}
# The kinds of bad examples, and the weight that the server gives to an input feature
# that is zero in all other examples.
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
    """The time of a step with no, one and half of its examples bad.

    Attributes
    ----------
    model, isolation, kind : str
    usual_seconds : float
        Median seconds of a step without bad examples, under the same weights.
    one_bad, half_bad : float
        Median with one and with half of the examples bad, in units of `usual_seconds`.
    cpu : float
        The ratio of CPU times that is farther from 1, of the two.
    """

    model: str
    isolation: str
    kind: str
    usual_seconds: float
    one_bad: float
    half_bad: float
    cpu: float

    @property
    def holds(self) -> bool:
        """Whether both ratios are within `TOLERANCE` of 1."""
        return max(abs(self.one_bad - 1.0), abs(self.half_bad - 1.0)) <= TOLERANCE


class _Step:
    """A repeatable step of a model on a batch with `bad` bad examples."""

    def __init__(self, model: str, kind: str, bad: int) -> None:
        make, shape, count = MODELS[model]
        torch.manual_seed(1)
        module, weight = make(), KINDS[kind]
        inputs, targets = torch.randn(count, *shape), torch.randint(CLASSES, (count,))
        examples: Examples
        if weight is not None:
            # The first feature or channel is non-zero in bad examples alone.
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
        self.cpu_seconds: list[float] = []
        self.run()
        self.isolation = self._gradients.isolation
        self.seconds.clear()
        self.cpu_seconds.clear()

    def run(self) -> None:
        """Take a step, and record its wall-clock and CPU time."""
        start, cpu_start = time.perf_counter(), time.process_time()
        private_vector(self._gradients, self._draw)
        self.cpu_seconds.append(time.process_time() - cpu_start)
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
    usual_cpu, *others = (statistics.median(step.cpu_seconds) for step in steps)
    cpu = max((other / usual_cpu for other in others), key=lambda r: abs(r - 1.0))
    return Timing(model, steps[0].isolation, kind, usual, one, half, cpu)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
