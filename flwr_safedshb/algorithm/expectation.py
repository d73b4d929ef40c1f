"""Say before a run what to expect of it: whether it trains, and what would help."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from logging import INFO, WARNING
from typing import TYPE_CHECKING

from flwr_safedshb.privacy.accounting.ranges import EPSILON, MAX_EXAMPLES
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.theory.trainability import (
    MAX_GROWTH,
    SAFE_LOAD,
    NoiseLoad,
    find_rate,
    growth,
    walk_length,
)

if TYPE_CHECKING:
    from flwr_safedshb.algorithm.wire import Arrays

_WORDS = {
    "will not train": "WILL NOT TRAIN",
    "may not train": "MAY NOT TRAIN",
    "can train": "The noise leaves room to train",
}
# A cure is named with up to so many nodes, and with at least this share of the weights.
_MANY_NODES, _LEAST_WEIGHTS = 10**6, 0.01


# Where the cures with their figures are.
_HELP = ("see what `safedshb plan` says would",)


@dataclass(frozen=True)
class Expectation:
    """What to expect of a training, and what would help, the cheapest first.

    Attributes
    ----------
    verdict : str
        "will not train", "may not train" or "can train".
    text : str
        One sentence with the figures it follows from.
    cures : tuple of str
        Any of them alone is enough.
    """

    verdict: str
    text: str
    cures: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.cures:
            return f"{self.text}."
        return f"{self.text}. Any of these helps: {'; or '.join(self.cures)}."


def make_load(plan: PrivacyPlan, steps: int, d: int, n: int, f: int = 0) -> NoiseLoad:
    """Return the noise load of a run whose nodes all have this plan."""
    return NoiseLoad(d, steps, plan.clip_norm, plan.noise_std, n, f)


def expect_training(found: NoiseLoad, cures: Sequence[str] = ()) -> Expectation:
    """Say whether a training has a chance at any learning rate."""
    text = (
        f"{_WORDS[found.verdict]}: noise load {_round(found.load)} (above 1 "
        f"hardly any training of ours got halfway, below {SAFE_LOAD:g} most did)"
    )
    if found.verdict == "can train":
        return Expectation(found.verdict, text)
    text += (
        f" for {found.d:,} weights, {found.steps:,} steps and {found.n - found.f:,} "
        f"honest nodes, whose noise has norm {_round(found.norm_ratio)} in a step, "
        "where a gradient has 1 at most"
    )
    return Expectation(found.verdict, text, tuple(cures))


def expect_plan(
    plan: PrivacyPlan, steps: int, delta: float, d: int, n: int, f: int = 0
) -> Expectation:
    """Say whether nodes with this plan can train, and what would help.

    Parameters
    ----------
    plan : PrivacyPlan
        Of every node.
    steps : int
        T.
    delta : float
        Where the epsilon of the run is kept.
    d : int
        Trained weights.
    n, f : int
        Nodes, and adversaries among them.
    """
    found = make_load(plan, steps, d, n, f)
    cures = () if found.verdict == "can train" else _list_cures(found, plan, delta)
    return expect_training(found, cures)


def expect_rate(
    arrays: Arrays, noise_std: float, honest: int, steps: int, rate: float, beta: float
) -> Expectation | None:
    """Say whether a learning rate turns the noise against the model; None if not.

    Parameters
    ----------
    arrays : list of arrays
        The trained parameters at the start.
    noise_std : float
        Of one node in every coordinate of its gradient.
    honest, steps : int
        Nodes whose mean is taken, and T.
    rate, beta : float
        gamma and the momentum.
    """
    wide = [array.astype("f8") for array in arrays if array.ndim > 1]
    layers = [(array.size, math.sqrt((array * array).sum())) for array in wide]
    walk = walk_length(noise_std, 1, honest, steps, rate, beta)
    times = growth(layers, walk)
    if times <= MAX_GROWTH:
        return None
    safe = find_rate(layers, walk, rate)
    text = (
        f"WILL NOT TRAIN at server_learning_rate={rate:g}: over {steps:,} steps noise "
        f"alone makes the model's outputs {_round(times)} times as large"
    )
    cure = f"lower server_learning_rate to {safe:.2g}"
    return Expectation("will not train", text, (cure,))


def expect_run(
    arrays: Arrays,
    noise_std: float,
    clip_norm: float | None,
    nodes: tuple[int, int],
    steps: int,
    rates: tuple[float, float],
) -> Iterator[Expectation]:
    """Yield what the server can say of a run, from public numbers.

    Parameters
    ----------
    arrays : list of arrays
        The trained parameters at the start.
    noise_std, clip_norm : float
        Of the nodes' plan; without C only the learning rate is judged.
    nodes : (int, int)
        n and f.
    steps : int
        T.
    rates : (float, float)
        gamma and beta of the first step.
    """
    n, f = nodes
    if clip_norm is not None:
        d = sum(array.size for array in arrays)
        yield expect_training(NoiseLoad(d, steps, clip_norm, noise_std, n, f))
    if found := expect_rate(arrays, noise_std, n - f, steps, *rates):
        yield found


@lru_cache(maxsize=64)
def log_once(expectation: Expectation) -> None:
    """Log what to expect, once in a process: nodes of a simulation are of one mind."""
    level = INFO if expectation.verdict == "can train" else WARNING
    # Here, because the command's help needs this module, and Flower takes long.
    from flwr.common import log

    log(level, "%s", expectation)


def log_node_expectation(
    plan: PrivacyPlan,
    arrays: Arrays,
    steps: int,
    rates: tuple[float, float],
    num_nodes: int | None,
) -> None:
    """Log on a node, before its first step, whether the run has a chance.

    Parameters
    ----------
    plan : PrivacyPlan
        Of this node; others are taken to have the same.
    arrays : list of arrays
        The trained parameters at the start.
    steps : int
        T.
    rates : (float, float)
        gamma, 0 where the node does not know it, and beta.
    num_nodes : int, optional
        n, known in a simulation. Without it only what holds for any n is said.
    """
    if plan.noise_multiplier == 0:
        return
    d = sum(array.size for array in arrays)
    found = make_load(plan, steps, d, 1 if num_nodes is None else num_nodes)
    if num_nodes is None:
        if found.load > 1.0:
            log_once(
                Expectation(
                    "may not train",
                    f"The noise of this node needs {found.find_nodes(1.0):,} honest "
                    "nodes like it, or the model will not train",
                )
            )
        return
    log_once(expect_training(found, _HELP if found.load > 1.0 else ()))
    rate, beta = rates
    if rate > 0 and (
        worst := expect_rate(arrays, plan.noise_std, num_nodes, steps, rate, beta)
    ):
        log_once(worst)


def _list_cures(found: NoiseLoad, plan: PrivacyPlan, delta: float) -> tuple[str, ...]:
    """Return what brings the load to where most trainings succeed, one by one."""
    epsilon, cures = plan.epsilon(found.steps, delta), []
    weights = found.find_weights()
    if weights >= _LEAST_WEIGHTS * found.d:
        cures.append(
            f"train at most {weights:,} weights (LoRA, or a frozen base and a new head)"
        )
    full = _fill_batch(plan, epsilon, delta, found.steps)
    least = replace(found, noise_std=full.noise_std)
    if least.load <= SAFE_LOAD:
        cures.append(f"a batch of all {plan.num_examples:,} examples")
    # In a full batch the noise falls like 1/m at the same epsilon.
    examples = math.ceil(plan.num_examples * least.load / SAFE_LOAD)
    if plan.num_examples < examples <= MAX_EXAMPLES:
        cures.append(f"{examples:,} examples in each node, all in a batch")
    if (nodes := found.find_nodes()) <= _MANY_NODES:
        cures.append(f"{nodes:,} nodes")
    noise = full.noise_multiplier * SAFE_LOAD / least.load
    try:
        larger = replace(full, noise_multiplier=noise).epsilon(found.steps, delta)
    except ValueError:  # less noise than can be accounted for
        larger = math.inf
    if epsilon < larger < EPSILON.greatest:
        cures.append(f"epsilon {larger:,.3g}, with all examples in a batch")
    return tuple(cures)


def _fill_batch(
    plan: PrivacyPlan, epsilon: float, delta: float, steps: int
) -> PrivacyPlan:
    """Return the plan with a full batch that costs the same."""
    if plan.batch_size == plan.num_examples or not 0 < epsilon < EPSILON.greatest:
        return plan
    return PrivacyPlan.calibrate(
        epsilon,
        delta,
        steps,
        clip_norm=plan.clip_norm,
        batch_size=plan.num_examples,
        num_examples=plan.num_examples,
        sampling=plan.sampling,
        adjacency=plan.adjacency,
    )


def _round(number: float) -> str:
    """Return two digits, without an exponent where people would write none."""
    if number >= 1e7 or number < 1e-3:
        return f"{number:.1e}"
    return f"{float(f'{number:.2g}'):,g}" if number < 1e6 else f"{number:,.0f}"
