"""Cost of a step by person: ``python -m simulations.benchmarks.owners``.

A step that draws persons with five examples each, beside a step by example over as many
examples, on the models of `client_step`. Every model has a process of its own with one
thread, and the two take turns in it.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.owners import make_owned_examples
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.private_gradient import private_gradient
from flwr_safedshb.privacy.randomness.noise import SecureRandomness
from simulations.benchmarks.measure import call_alone, median_in_turns
from simulations.benchmarks.result import (
    Measurement,
    Result,
    ResultTable,
    run_benchmark,
)
from simulations.benchmarks.steps import TASKS, Step

PER_OWNER = 5
SECONDS = 10.0


def make_steps(name: str) -> dict[str, Step]:
    """Return a step by example and a step by person, of as many examples."""
    task, noise = TASKS[name], SecureRandomness()
    torch.manual_seed(0)
    model, (inputs, targets) = task.make(), task.make_data()
    batch = max(1, task.batch_size // PER_OWNER)
    count = len(inputs) // PER_OWNER
    data = inputs[: count * PER_OWNER], targets[: count * PER_OWNER]
    owners = np.repeat(np.arange(count), PER_OWNER)
    owned = make_owned_examples(data, owners, PER_OWNER)
    plan = PrivacyPlan(1.0, 1.0, batch * PER_OWNER, count * PER_OWNER)
    persons = PrivacyPlan(1.0, 1.0, batch, count, unit="person")
    alone = ClippedGradients(model, task.loss, 1.0)
    grouped = ClippedGradients(model, task.loss, 1.0, per_owner=PER_OWNER)
    return {
        "by example": lambda: private_gradient(alone, data, plan, noise),
        "by person": lambda: private_gradient(grouped, owned, persons, noise),
    }


def time_model(name: str, enough: float) -> dict[str, float]:
    """Return the median seconds of both steps."""
    steps = make_steps(name)
    for step in itertools.chain(*[steps.values()] * 2):
        step()
    return median_in_turns(steps, enough, most=1000)


def measure(quick: bool) -> Result:
    """Measure every model."""
    enough = 0.5 if quick else SECONDS
    times = {name: call_alone(time_model, name, enough) for name in TASKS}
    ratios = {
        name: each["by person"] / each["by example"] for name, each in times.items()
    }
    return Result(
        tables=[
            ResultTable(
                "A step by person / a step by example",
                ("model", "by example ms", "by person ms", "ratio"),
                [
                    (
                        f"{name}, {TASKS[name].batch_size // PER_OWNER} persons",
                        *(1e3 * seconds for seconds in times[name].values()),
                        ratio,
                    )
                    for name, ratio in ratios.items()
                ],
                f"{PER_OWNER} examples of each person, as many in all; a deployment's "
                "noise. One thread, the processor's time.",
            )
        ],
        figures={
            f"{name}: by person / by example": Measurement(ratio)
            for name, ratio in ratios.items()
        },
        costs={f"{name}, by person / by example": r for name, r in ratios.items()},
        raw={"seconds": times},
    )


if __name__ == "__main__":
    raise SystemExit(run_benchmark("owners"))
