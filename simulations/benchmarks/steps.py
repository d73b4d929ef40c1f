"""Steps of a client, ours and others', on the models of `STEP_MODELS`."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleModuleFastGradientClipping,
)
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn
from torch.nn import functional

from flwr_safedshb.audit.zoo.resnet import resnet18
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.private_gradient import BLOCK, private_gradient
from flwr_safedshb.privacy.randomness.noise import SecureRandomness, SeededRandomness
from simulations.benchmarks.measure import median_in_turns, peak_megabytes
from simulations.models import CNN, MLP, LogisticRegression

Step = Callable[[], object]
PLAIN, OURS, SECURE = "plain SGD", "ours", "ours, secure"
PER_EXAMPLE, GHOST = OPACUS = ("Opacus, per-example", "Opacus, ghost")
STEPS = (PLAIN, OURS, SECURE, *OPACUS)


@dataclass(frozen=True)
class Task:
    """A model, its examples and its batches."""

    make: Callable[[], nn.Module]
    loss: nn.CrossEntropyLoss | nn.BCEWithLogitsLoss
    shape: tuple[int, ...]  # of an input
    classes: int  # one for a target in [0, 1]
    examples: int
    batch_size: int

    def make_data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of all examples."""
        inputs = torch.randn(self.examples, *self.shape)
        if self.classes == 1:
            return inputs, torch.randint(2, (self.examples, 1)).float()
        return inputs, torch.randint(self.classes, (self.examples,))

    def make_plan(self) -> PrivacyPlan:
        """Return the plan of a client that has these examples."""
        return PrivacyPlan(1.0, 1.0, self.batch_size, self.examples)

    def count_parameters(self) -> int:
        """Return the number of parameters."""
        return sum(p.numel() for p in self.make().parameters())


class _Block(nn.Module):
    """A layer of a transformer, (k, positions, width), made of what Opacus knows."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm1(inputs))
        heads = qkv.unflatten(2, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads)
        hidden = inputs + self.out(attended.transpose(1, 2).flatten(2))
        outputs: torch.Tensor = hidden + self.mlp(self.norm2(hidden))
        return outputs


class Transformer(nn.Module):
    """Two layers on sequences of vectors, whose mean tells the class."""

    def __init__(self, width: int, heads: int, num_outputs: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(_Block(width, heads), _Block(width, heads))
        self.head = nn.Linear(width, num_outputs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits, (k, num_outputs), of (k, positions, width)."""
        outputs: torch.Tensor = self.head(self.blocks(inputs).mean(dim=1))
        return outputs


def make_mlp_task(hidden: int) -> Task:
    """Return the task of a model with two hidden layers."""
    loss = nn.CrossEntropyLoss()
    return Task(lambda: MLP(784, 10, (hidden, hidden)), loss, (784,), 10, 1000, 64)


# The paper's model and data, a small network for images, a large one, and two of kinds
# that a user may bring.
TASKS = {
    "logistic": Task(
        lambda: LogisticRegression(68), nn.BCEWithLogitsLoss(), (68,), 1, 2763, 25
    ),
    "CNN": Task(
        lambda: CNN((1, 28, 28), 10), nn.CrossEntropyLoss(), (1, 28, 28), 10, 1000, 64
    ),
    "MLP": make_mlp_task(1000),
    "transformer": Task(
        lambda: Transformer(128, 4, 10), nn.CrossEntropyLoss(), (32, 128), 10, 1000, 32
    ),
    "ResNet-18": Task(
        lambda: resnet18(10), nn.CrossEntropyLoss(), (3, 32, 32), 10, 100, 8
    ),
}
_TINY = Task(lambda: MLP(4, 2, (4,)), nn.CrossEntropyLoss(), (4,), 2, 8, 4)


def make_step(task: Task, name: str) -> Step:
    """Return a function whose call is one step.

    Plain SGD and Opacus get their batch; ours draw it in every step, as a client does.
    """
    torch.manual_seed(0)
    model, data = task.make(), task.make_data()
    if name in (OURS, SECURE):
        source = SeededRandomness(0) if name == OURS else SecureRandomness()
        plan, numbers = task.make_plan(), itertools.count()
        gradients = ClippedGradients(model, task.loss, plan.clip_norm)
        return lambda: private_gradient(
            gradients, data, plan, source.for_step(0, next(numbers))
        )
    inputs, targets = (part[: task.batch_size] for part in data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if name == PLAIN:
        return partial(_sgd_step, model, task.loss, optimizer, inputs, targets)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    settings = {
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "expected_batch_size": task.batch_size,
    }
    if name == PER_EXAMPLE:
        private = DPOptimizer(optimizer, **settings)
        hooked = GradSampleModule(model)
        return partial(_sgd_step, hooked, task.loss, private, inputs, targets)
    private = DPOptimizerFastGradientClipping(optimizer, **settings)
    hooked = GradSampleModuleFastGradientClipping(
        model, max_grad_norm=1.0, use_ghost_clipping=True
    )
    loss = DPLossFastGradientClipping(hooked, private, task.loss)
    return partial(_sgd_step, hooked, loss, private, inputs, targets)


def _sgd_step(
    model: nn.Module,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    optimizer.zero_grad()
    loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def time_steps(name: str, enough: float) -> dict[str, float]:
    """Return the median seconds of every step, and of what a secure one draws."""
    task = TASKS[name]
    steps = {step: make_step(task, step) for step in STEPS}
    source, plan, size = SecureRandomness(), task.make_plan(), task.count_parameters()
    steps["batch"] = lambda: plan.sampler.draw(plan, source)
    blocks = [min(BLOCK, size - start) for start in range(0, size, BLOCK)]
    steps["noise"] = lambda: [source.gaussian(b, plan.noise_std) for b in blocks]
    for step in steps.values():
        step()
    return median_in_turns(steps, enough, most=1000)


def measure_memory(name: str, step_name: str) -> dict[str, float]:
    """Return MB: a step's peak beyond model and data, and the size of the model."""
    task = TASKS[name]
    make_step(_TINY, step_name)()  # loads what is loaded late
    step = make_step(task, step_name)
    peak = peak_megabytes(lambda: [step() for _ in range(3)])
    return {"peak": peak, "model": 4 * task.count_parameters() / 2**20}
