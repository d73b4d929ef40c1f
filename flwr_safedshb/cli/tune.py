"""Choose the schedule that withstands the worst attack, on public or made-up data.

Private data must not be tried twice: each try costs privacy. So settings are found on
data that anybody may see, like those that will be trained on. Every combination of what
is listed is trained in this process at the same epsilon, with noise to match, under
colluders who pull along a target and under the strongest attack of every step. What
counts is the worst of them, on average over the seeds.

  safedshb tune --nodes 7 -f 2 --epsilon 1 --steps 20 40 --clip 0.1 0.3 1 --rate 10 50
  safedshb tune --data public.npz --model my_app:make_model --nodes 10 -f 1 --json

public.npz holds `inputs` and `targets` (classes); without it three classes are made up.
A model is a function without arguments; without it, it is linear. The table also has
the signal and the distance that `safedshb plan` asks for.
"""

from __future__ import annotations

import argparse
import copy
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
    from flwr.serverapp import Grid

    from flwr_safedshb.algorithm.wire import Arrays
    from flwr_safedshb.app import ClientFn
    from flwr_safedshb.attacks import Attack
    from flwr_safedshb.client import SafeDSHBClient
    from flwr_safedshb.privacy.plan import PrivacyPlan
    from flwr_safedshb.simulation.adversarial import GradientFunction

    Data = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]

# A tenth of the data is held back to compare settings by.
_HELD_BACK = 10
_CHOICES: dict[str, tuple[type, list[float], str]] = {
    "clip": (float, [0.1, 0.3, 1.0], "clip_norm, C"),
    "batch": (int, [0], "batch_size, b; 0: all examples of a node"),
    "steps": (int, [20, 40], "T"),
    "momentum": (float, [0.8], "of clients, beta"),
    "rate": (float, [1.0, 10.0], "first server_learning_rate; falls linearly to 0"),
}


class TuneTrial(NamedTuple):
    """One combination of settings, and what the worst attack leaves of it.

    Attributes
    ----------
    noise : float
        The noise multiplier that meets the target epsilon.
    epsilon : float
        Accounted; never above the target.
    attack : str
        The one that leaves the highest loss.
    loss, accuracy : float
        Under that attack, on data that were held back; means over the seeds.
    signal, distance : float
        Of `measure_signal`.
    """

    clip: float
    batch: int
    steps: int
    momentum: float
    rate: float
    noise: float
    epsilon: float
    attack: str
    loss: float
    accuracy: float
    signal: float
    distance: float


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
    parser.add_argument("--epsilon", type=float, default=1.0, help="of all trials (1)")
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("-n", "--nodes", type=int, default=7, help="n (7)")
    parser.add_argument(
        "-f", "--malicious", type=int, default=1, help="f of them attack (1)"
    )
    parser.add_argument("--seeds", type=int, default=2, help="runs of each attack (2)")
    parser.add_argument("--data", type=Path, help="an .npz of inputs and targets")
    parser.add_argument("--model", metavar="MODULE:FUNCTION")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print every trial, the one with the lowest worst loss first."""
    from rich.console import Console
    from rich.progress import track

    if not 0 <= 2 * arguments.malicious < arguments.nodes:
        raise ValueError(
            f"malicious={arguments.malicious} needs n > 2f, got n={arguments.nodes}; "
            "lower it or add nodes"
        )
    if arguments.seeds < 1:
        raise ValueError(f"seeds={arguments.seeds} must be at least 1")
    data = _load_data(arguments.data)
    choices = [*itertools.product(*(getattr(arguments, name) for name in _CHOICES))]
    console = Console(stderr=True)
    hidden = not console.is_terminal
    trials = [
        _run_trial(arguments, data, chosen)
        for chosen in track(choices, "Trials", console=console, disable=hidden)
    ]
    trials.sort(key=lambda trial: trial.loss)
    if arguments.json:
        print(json.dumps([trial._asdict() for trial in trials], indent=2))
        return 0
    from flwr_safedshb.cli._listing import print_table

    rows = [
        tuple(v if isinstance(v, str) else f"{v:.4g}" for v in trial)
        for trial in trials
    ]
    title = (
        f"n = {arguments.nodes}, f = {arguments.malicious}, epsilon at most "
        f"{arguments.epsilon:g} at delta = {arguments.delta:g}, SMEA, linear decay, "
        "the average of the last half of the models"
    )
    print_table(title, TuneTrial._fields, rows)
    return 0


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
) -> TuneTrial:
    """Train under each attack with each seed, and keep the worst attack."""
    import numpy as np
    import torch

    from flwr_safedshb.attacks import Strongest, Target
    from flwr_safedshb.privacy.plan import PrivacyPlan
    from flwr_safedshb.simulation.task_signal import measure_signal

    clip, batch, steps, momentum, rate = chosen
    inputs, targets = data
    held = len(inputs) // _HELD_BACK
    size = (len(inputs) - held) // (arguments.nodes - arguments.malicious)
    plan = PrivacyPlan.calibrate(
        arguments.epsilon,
        arguments.delta,
        int(steps),
        clip_norm=clip,
        batch_size=int(batch) or size,
        num_examples=size,
    )
    model = _make_model(arguments.model, inputs[0].size, int(targets.max()) + 1)
    public = torch.from_numpy(inputs[held:]), torch.from_numpy(targets[held:])
    task = measure_signal(model, torch.nn.CrossEntropyLoss(), *public, clip)
    attacks: dict[str, Attack | None] = {"none": None}
    if arguments.malicious:
        attacks = {"target": Target(goal=-task.way), "strongest": Strongest()}
    settings = _Settings(
        int(steps), rate, momentum, arguments.nodes, arguments.malicious
    )
    found = {
        name: np.mean(
            [
                _train(model, plan, data, settings, attack, seed)
                for seed in range(arguments.seeds)
            ],
            axis=0,
        )
        for name, attack in attacks.items()
    }
    # A loss that is not finite is the worst.
    worst = max(
        found, key=lambda name: float(np.nan_to_num(found[name][0], nan=np.inf))
    )
    loss, accuracy = map(float, found[worst])
    return TuneTrial(
        clip,
        plan.batch_size,
        settings.steps,
        momentum,
        rate,
        plan.noise_multiplier,
        plan.epsilon(settings.steps, arguments.delta),
        worst,
        loss,
        accuracy,
        task.signal,
        task.distance,
    )


class _Settings(NamedTuple):
    """What a run of a trial is made of."""

    steps: int
    rate: float
    momentum: float
    nodes: int
    malicious: int


def _train(
    model: torch.nn.Module,
    plan: PrivacyPlan,
    data: Data,
    settings: _Settings,
    attack: Attack | None,
    seed: int,
) -> tuple[float, float]:
    """Train once; return loss and accuracy on the data that were held back."""
    import torch

    from flwr_safedshb.aggregation import SMEA
    from flwr_safedshb.algorithm.model_arrays import trained_arrays
    from flwr_safedshb.algorithm.schedules import LinearDecay
    from flwr_safedshb.app import client_app
    from flwr_safedshb.simulation.adversarial import AdversarialGrid
    from flwr_safedshb.simulation.batched import BatchedGrid
    from flwr_safedshb.strategy import SafeDSHB

    steps, rate, momentum, nodes, malicious = settings
    inputs, targets = data
    held = len(inputs) // _HELD_BACK
    trained = inputs[held:], targets[held:]
    app = client_app(_make_client_fn(model, plan, trained, seed))
    grid: Grid = BatchedGrid(app, nodes)
    if attack is not None:
        known = _make_gradient(model, trained)
        grid = AdversarialGrid(grid, attack, malicious, SMEA(), seed, known)
    rates = LinearDecay(rate, momentum, steps)
    strategy = SafeDSHB(
        SMEA(),
        malicious,
        server_learning_rate=rates.learning_rate,
        momentum=momentum,
        output="average",
        seed=seed,
    )
    with _silence_flower():
        result = strategy.start(grid, trained_arrays(model), steps)
    model = copy.deepcopy(model).eval()
    model.load_state_dict(result.arrays.to_torch_state_dict(), strict=False)
    with torch.no_grad():
        outputs, right = model(torch.from_numpy(inputs[:held])), targets[:held]
        loss = torch.nn.functional.cross_entropy(outputs, torch.from_numpy(right))
    return float(loss), float((outputs.argmax(1).numpy() == right).mean())


def _make_gradient(model: torch.nn.Module, data: Data) -> GradientFunction:
    """Return a function from a model's arrays to the gradient of its loss."""
    import torch

    from flwr_safedshb.algorithm.model_arrays import load_weights, trained_parameters

    model = copy.deepcopy(model).eval()
    weights = [*trained_parameters(model).values()]
    inputs, targets = map(torch.from_numpy, data)

    def gradient(sent: Arrays) -> np.ndarray[Any, Any]:
        load_weights(weights, sent)
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        parts = torch.autograd.grad(loss, weights)
        return torch.nn.utils.parameters_to_vector(parts).double().numpy()

    return gradient


def _make_client_fn(
    model: torch.nn.Module, plan: PrivacyPlan, data: Data, seed: int
) -> ClientFn:
    """Return a function that makes clients, each with an equal share of the data."""
    import torch

    from flwr_safedshb.client import SafeDSHBClient
    from flwr_safedshb.privacy.randomness.noise import SeededRandomness

    loss = torch.nn.CrossEntropyLoss()

    def client_fn(context: Context) -> SafeDSHBClient:
        start = int(context.node_config["partition-id"]) * plan.num_examples
        mine = slice(start, start + plan.num_examples)
        examples = data[0][mine], data[1][mine]
        noise = SeededRandomness(seed)
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
