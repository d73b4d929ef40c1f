"""Steps of a client, ours and others', on several models, in a process of their own.

``python -m simulations.benchmarks.steps time MODEL SECONDS`` times all steps in turns
on one thread, ``... memory MODEL STEP`` measures the memory of one; both print JSON.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TypedDict

import torch
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleModuleFastGradientClipping,
)
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn

from flwr_safedshb.audit.zoo.resnet import resnet18
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.private_gradient import BLOCK, private_gradient
from flwr_safedshb.privacy.randomness.noise import SecureRandomness, SeededRandomness
from simulations.benchmarks.measure import in_turns, reset_peak, resident
from simulations.benchmarks.networks import Transformer
from simulations.models import CNN, MLP, LogisticRegression

Step = Callable[[], object]
PLAIN, OURS, SECURE = "plain SGD", "ours", "ours, secure"
OPACUS = ("Opacus, per-example", "Opacus, ghost")


@dataclass(frozen=True)
class Task:
    """A model, its examples and its batches.

    Attributes
    ----------
    make : callable
    loss : nn.Module
    shape : tuple of int
        Of an input.
    classes : int
        One for a target in [0, 1].
    examples, batch_size : int
    """

    make: Callable[[], nn.Module]
    loss: nn.CrossEntropyLoss | nn.BCEWithLogitsLoss
    shape: tuple[int, ...]
    classes: int
    examples: int
    batch_size: int

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of all examples."""
        inputs = torch.randn(self.examples, *self.shape)
        if self.classes == 1:
            return inputs, torch.randint(2, (self.examples, 1)).float()
        return inputs, torch.randint(self.classes, (self.examples,))

    def plan(self) -> PrivacyPlan:
        """Return the plan of a client that has these examples."""
        return PrivacyPlan(1.0, 1.0, self.batch_size, self.examples)


# The paper's model and data, a small network for images, a large one, and two of kinds
# that a user may bring.
TASKS = {
    "logistic": Task(
        lambda: LogisticRegression(68), nn.BCEWithLogitsLoss(), (68,), 1, 2763, 25
    ),
    "CNN": Task(
        lambda: CNN((1, 28, 28), 10), nn.CrossEntropyLoss(), (1, 28, 28), 10, 1000, 64
    ),
    "MLP": Task(
        lambda: MLP(784, 10, (1000, 1000)), nn.CrossEntropyLoss(), (784,), 10, 1000, 64
    ),
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
    model, data = task.make(), task.data()
    if name in (OURS, SECURE):
        source = SeededRandomness(0) if name == OURS else SecureRandomness()
        plan, numbers = task.plan(), itertools.count()
        gradients = ClippedGradients(model, task.loss, plan.clip_norm)
        return lambda: private_gradient(
            gradients, data, plan, source.for_step(0, next(numbers))
        )
    inputs, targets = (part[: task.batch_size] for part in data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if name == PLAIN:
        return partial(_descend, model, task.loss, optimizer, inputs, targets)
    settings = {
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "expected_batch_size": task.batch_size,
    }
    if name == OPACUS[0]:
        private = DPOptimizer(optimizer, **settings)
        hooked = GradSampleModule(model)
        return partial(_descend, hooked, task.loss, private, inputs, targets)
    private = DPOptimizerFastGradientClipping(optimizer, **settings)
    hooked = GradSampleModuleFastGradientClipping(
        model, max_grad_norm=1.0, use_ghost_clipping=True
    )
    loss = DPLossFastGradientClipping(hooked, private, task.loss)
    return partial(_descend, hooked, loss, private, inputs, targets)


def _descend(
    model: nn.Module,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    optimizer.zero_grad()
    loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def seconds(name: str, enough: float) -> dict[str, float]:
    """Return the median seconds of every step, and of what a secure one draws."""
    task = TASKS[name]
    steps = {step: make_step(task, step) for step in (PLAIN, OURS, SECURE, *OPACUS)}
    source, plan = SecureRandomness(), task.plan()
    size = sum(p.numel() for p in task.make().parameters())
    steps["batch"] = lambda: plan.sampler.draw(plan, source)
    blocks = [min(BLOCK, size - start) for start in range(0, size, BLOCK)]
    steps["noise"] = lambda: [source.gaussian(b, plan.noise_std) for b in blocks]
    for step in steps.values():
        step()
    turns = in_turns(steps, enough, most=1000)
    return {step: median(values) for step, values in turns.items()}


class Memory(TypedDict):
    """MB: the peak while stepping, beyond model and data, and the size of the model."""

    peak: float
    model: float


def memory(name: str, step_name: str) -> Memory:
    """Return the peak of a step beyond model and data, and the size of the model."""
    task = TASKS[name]
    make_step(_TINY, step_name)()  # loads what is loaded late
    step = make_step(task, step_name)
    before = resident("VmRSS")
    reset_peak()
    for _ in range(3):
        step()
    size = sum(p.numel() for p in task.make().parameters())
    return Memory(peak=(resident("VmHWM") - before) / 1024, model=4 * size / 2**20)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    match sys.argv[1:]:
        case ["time", name, enough]:
            print(json.dumps(seconds(name, float(enough))))
        case ["memory", name, step]:
            print(json.dumps(memory(name, step)))
        case _:
            sys.exit(f"{sys.argv[1:]}: say time MODEL SECONDS or memory MODEL STEP")
