"""Try clip, noise, batch, momentum and rate on public or made-up data, beside epsilon.

Each trial on private data would cost privacy. So try settings on public data of the
same kind, or on made-up data. This runs every combination of the listed values, in this
process, with seeded noise, and prints epsilon and accuracy of each.

  safedshb tune --clip 0.5 1 2 --noise 0.5 1 --rate 0.3 1 --steps 100
  safedshb tune --data public.npz --model my_app:make_model --nodes 10 --json

public.npz holds `inputs` and `targets` (classes); without --data three classes are made
up. --model names a function that returns your model; without it the model is linear.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    import numpy as np
    import torch
    from flwr.app import Context

    from flwr_safedshb.app import ClientFn
    from flwr_safedshb.client import SafeDSHBClient
    from flwr_safedshb.privacy.plan import PrivacyPlan

    Data = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]

# A tenth of the data is held back to compare settings by.
_HELD_BACK = 10
_CHOICES: dict[str, tuple[type, list[float], str]] = {
    "clip": (float, [0.5, 1.0, 2.0], "clip_norm, C"),
    "noise": (float, [1.0], "noise_multiplier"),
    "batch": (int, [32], "batch_size, b"),
    "momentum": (float, [0.9], "of clients, beta"),
    "rate": (float, [0.3, 1.0], "server_learning_rate, gamma"),
}


class TuneTrial(NamedTuple):
    """One combination of settings, its epsilon and its accuracy."""

    clip: float
    noise: float
    batch: int
    momentum: float
    rate: float
    epsilon: float
    accuracy: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    for name, (kind, default, text) in _CHOICES.items():
        values = " ".join(f"{value:g}" for value in default)
        parser.add_argument(
            f"--{name}",
            type=kind,
            nargs="+",
            default=default,
            help=f"{text} (default: {values})",
        )
    parser.add_argument("--steps", type=int, default=100, metavar="T")
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--nodes", type=int, default=5, metavar="N")
    parser.add_argument("--data", type=Path, help="an .npz of inputs and targets")
    parser.add_argument("--model", metavar="MODULE:FUNCTION")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print every trial, the most accurate first."""
    data = _load_data(arguments.data)
    choices = itertools.product(*(getattr(arguments, name) for name in _CHOICES))
    trials = [
        TuneTrial._make((*chosen, *_run_trial(arguments, data, chosen)))
        for chosen in choices
    ]
    trials.sort(key=lambda trial: (-trial.accuracy, trial.epsilon))
    if arguments.json:
        print(json.dumps([trial._asdict() for trial in trials], indent=2))
        return 0
    from flwr_safedshb.cli._listing import print_table

    rows = [tuple(f"{value:.4g}" for value in trial) for trial in trials]
    title = f"{arguments.steps} steps, delta = {arguments.delta:g}, no adversaries"
    print_table(title, TuneTrial._fields, rows)
    print(f"The first of them: {_describe_noise(arguments, data, trials[0])}")
    return 0


def _describe_noise(arguments: argparse.Namespace, data: Data, best: TuneTrial) -> str:
    """Say whether the noise leaves room to train, and what would help."""
    from flwr_safedshb.algorithm.expectation import expect_plan
    from flwr_safedshb.privacy.plan import PrivacyPlan

    inputs, targets = data
    model = _make_model(arguments.model, inputs[0].size, int(targets.max()) + 1)
    d = sum(p.numel() for p in model.parameters() if p.requires_grad)
    plan = PrivacyPlan(
        best.clip, best.noise, int(best.batch), _share_size(arguments, data)
    )
    found = expect_plan(plan, arguments.steps, arguments.delta, d, arguments.nodes)
    return str(found)


def _share_size(arguments: argparse.Namespace, data: Data) -> int:
    """Return the number of examples of a node."""
    nodes: int = arguments.nodes
    return (len(data[0]) - len(data[0]) // _HELD_BACK) // nodes


def _load_data(path: Path | None) -> Data:
    """Load or make up inputs and classes, in a random order."""
    import numpy as np

    rng = np.random.default_rng(0)
    if path is None:
        targets = rng.integers(3, size=5000)
        centres = rng.normal(size=(3, 20))
        inputs = centres[targets] + 2.0 * rng.normal(size=(5000, 20))
    else:
        with np.load(path, allow_pickle=False) as file:
            missing = {"inputs", "targets"} - {*file.files}
            if missing:
                raise ValueError(f"{path} has no {' and no '.join(sorted(missing))}")
            inputs, targets = file["inputs"], file["targets"]
        if (
            len(inputs) != len(targets)
            or targets.ndim != 1
            or targets.dtype.kind != "i"
        ):
            raise ValueError(f"{path}: targets must be a class for each of the inputs")
    order = rng.permutation(len(inputs))
    return inputs[order].astype(np.float32), targets[order].astype(np.int64)


def _make_model(name: str | None, features: int, classes: int) -> torch.nn.Module:
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name is None:
            return torch.nn.Sequential(
                torch.nn.Flatten(), torch.nn.Linear(features, classes)
            )
        module, _, function = name.partition(":")
        sys.path.insert(0, str(Path.cwd()))
        try:
            return cast(
                torch.nn.Module, getattr(importlib.import_module(module), function)()
            )
        except (ImportError, AttributeError) as error:
            raise ValueError(f"--model={name} cannot be loaded: {error}") from error


def _run_trial(
    arguments: argparse.Namespace, data: Data, chosen: tuple[float, ...]
) -> tuple[float, float]:
    """Train once; return epsilon and accuracy."""
    import torch

    from flwr_safedshb.aggregation import Average
    from flwr_safedshb.algorithm.model_arrays import trained_arrays
    from flwr_safedshb.app import client_app
    from flwr_safedshb.privacy.plan import PrivacyPlan
    from flwr_safedshb.simulation.batched import BatchedGrid
    from flwr_safedshb.strategy import SafeDSHB

    clip, noise, batch, momentum, rate = chosen
    inputs, targets = data
    held = len(inputs) // _HELD_BACK
    plan = PrivacyPlan(clip, noise, int(batch), _share_size(arguments, data))
    model = _make_model(arguments.model, inputs[0].size, int(targets.max()) + 1)
    grid = BatchedGrid(
        client_app(_make_client_fn(model, plan, (inputs[held:], targets[held:]))),
        arguments.nodes,
    )
    strategy = SafeDSHB(Average(), server_learning_rate=rate, momentum=momentum)
    with _silence_flower():
        result = strategy.start(grid, trained_arrays(model), arguments.steps)
    model.load_state_dict(result.arrays.to_torch_state_dict(), strict=False)
    with torch.no_grad():
        found = model.eval()(torch.from_numpy(inputs[:held])).argmax(1).numpy()
    accuracy = float((found == targets[:held]).mean())
    return plan.epsilon(arguments.steps, arguments.delta), accuracy


def _make_client_fn(model: torch.nn.Module, plan: PrivacyPlan, data: Data) -> ClientFn:
    """Return a function that makes clients, each with an equal share of the data."""
    import torch

    from flwr_safedshb.client import SafeDSHBClient
    from flwr_safedshb.privacy.randomness.noise import SeededRandomness

    loss = torch.nn.CrossEntropyLoss()

    def client_fn(context: Context) -> SafeDSHBClient:
        start = int(context.node_config["partition-id"]) * plan.num_examples
        mine = slice(start, start + plan.num_examples)
        examples = data[0][mine], data[1][mine]
        noise = SeededRandomness(0)
        return SafeDSHBClient(model, loss, examples, plan, context, randomness=noise)

    return client_fn


@contextmanager
def _silence_flower() -> Iterator[None]:
    """Silence what Flower logs of every round."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
