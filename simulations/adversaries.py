"""What the adversaries of an experiment know: of the loss, its optimum and the run.

They hold copies of what honest nodes hold, as those who flip labels do. Where that is a
lot, they use every second, third or fourth: more would tell them little more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from flwr_safedshb.algorithm.model_arrays import load_weights, trained_parameters
from flwr_safedshb.algorithm.wire import Arrays
from flwr_safedshb.attacks import Attack, PushPlanner
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.strategy import SafeDSHB
from simulations.attacks import Lookahead
from simulations.config import compose_config
from simulations.data import Examples
from simulations.experiment import build_untrained, load_federation, make_attack
from simulations.models import (
    find_way_to_optimum,
    loss_and_targets,
    loss_gradient,
)

GradientFunction = Callable[[Arrays], NDArray[np.float64]]

# On at most about so many examples adversaries compute a gradient in every step.
_KNOWN_EXAMPLES = 10_000
# On about so many they plan, with a hundred gradients and more in every step.
_PLANNED_EXAMPLES = 1_500


def inform_attack(
    overrides: str, strategy: SafeDSHB
) -> tuple[Attack, GradientFunction]:
    """Return the attack of an experiment, and the gradient that it is to know."""
    attack = make_attack(compose_config(overrides))
    if attack.wants_goal:
        attack = attack.with_goal(find_goal(overrides))
    if isinstance(attack, Lookahead):
        return attack, make_planner(overrides, strategy, attack)
    return attack, make_gradient(overrides)


def make_gradient(overrides: str) -> GradientFunction:
    """Return a function from a model to the gradient of the adversaries' own loss."""
    cfg = compose_config(overrides)
    held = _held_by_adversaries(overrides, _KNOWN_EXAMPLES)
    model = copy.deepcopy(build_untrained(overrides))
    weights = [*trained_parameters(model).values()]

    def gradient(sent: Arrays) -> NDArray[np.float64]:
        load_weights(weights, sent)
        return loss_gradient(model, held, cfg.weight_decay).astype(np.float64)

    return gradient


@lru_cache(maxsize=8)
def find_goal(overrides: str) -> NDArray[np.float64]:
    """Return the way from the first model away from the optimum, (d,).

    That is the optimum of the adversaries' own examples, which they train without noise
    and without clipping, as they hold what `make_gradient` says.
    """
    cfg = compose_config(overrides)
    held = _held_by_adversaries(overrides, _KNOWN_EXAMPLES)
    way = find_way_to_optimum(build_untrained(overrides), held, cfg.weight_decay)
    return -way.astype(np.float64)


def make_planner(
    overrides: str, strategy: SafeDSHB, attack: Lookahead
) -> GradientFunction:
    """Return a planner of pushes who knows the strategy's rates and the clients' clip.

    K local steps are one step to it, with the momentum that K steps leave.
    """
    cfg, held = (
        compose_config(overrides),
        _held_by_adversaries(overrides, _PLANNED_EXAMPLES),
    )
    model = copy.deepcopy(build_untrained(overrides))
    trained = [*trained_parameters(model).values()]
    inputs = torch.cat([inputs for inputs, _ in held])
    labels = torch.cat([labels for _, labels in held])
    loss, targets = loss_and_targets(model, (inputs, labels))
    clipped = ClippedGradients(model, loss, cfg.privacy.plan.clip_norm)

    ends = np.cumsum([weight.numel() for weight in trained])[:-1]
    shapes = [tuple(weight.shape) for weight in trained]

    def load(weights: NDArray[np.float64]) -> None:
        parts = zip(np.split(weights.astype(np.float32), ends), shapes, strict=True)
        load_weights(trained, [part.reshape(shape) for part, shape in parts])

    def client_gradient(weights: NDArray[np.float64]) -> NDArray[np.float64]:
        load(weights)
        total = clipped.flat_sum(inputs, targets).numpy() / len(labels)
        return np.asarray(total + cfg.weight_decay * weights)

    def gradient(weights: NDArray[np.float64]) -> NDArray[np.float64]:
        load(weights)
        return loss_gradient(model, held, cfg.weight_decay).astype(np.float64)

    def rates(number: int) -> tuple[float, float]:
        gamma, beta = strategy.settings.rates_in_round(number)
        return gamma * cfg.local_steps, beta**cfg.local_steps

    return PushPlanner(
        client_gradient,
        gradient,
        rates,
        cfg.steps // cfg.local_steps,
        attack.output or ("last" if cfg.output == "last" else "average"),
        attack.horizon,
        attack.num_plans,
    )


def _held_by_adversaries(overrides: str, count: int) -> list[Examples]:
    """Return what each adversary holds, of many examples about `count` in all."""
    cfg, data = compose_config(overrides), load_federation(overrides)
    held = [data.shards[i % len(data.shards)] for i in range(cfg.num_malicious_nodes)]
    stride = -(-sum(len(labels) for _, labels in held) // count)
    return [(inputs[::stride], labels[::stride]) for inputs, labels in held]
