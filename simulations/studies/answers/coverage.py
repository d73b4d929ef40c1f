"""Intervals with liars among the nodes, and epsilon by another accountant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import dp_accounting as dp
import numpy as np
from dp_accounting.pld import PLDAccountant
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_safedshb.client.evaluation import Metrics, PrivateEvaluation, reported
from flwr_safedshb.exchange.arrays import MARK
from flwr_safedshb.exchange.evaluations import CORRECT, NOISE_STD
from flwr_safedshb.flower.compat import set_id
from flwr_safedshb.grids.in_process import InProcessGrid
from flwr_safedshb.privacy.accounting.accountant import epsilon
from flwr_safedshb.privacy.evaluation import Question, private_counts
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.randomness.noise import SeededRandomness
from flwr_safedshb.server.private_evaluation import PrivateEvaluations, concluded
from simulations.studies.answers.data import MAX_LOSS, MODEL, examples

NODES, LIARS, EXAMPLES = 7, 2, 40
NOISE = 2.0
Lie = Callable[[float, np.random.Generator], dict[str, float]]
# What liars say, who know what the honest nodes say on average.
LIES: dict[str, Lie] = {
    "nothing is right": lambda mean, rng: {CORRECT: 0.0},
    "everything is right": lambda mean, rng: {CORRECT: float(EXAMPLES)},
    "one the one, one the other": lambda mean, rng: {
        CORRECT: EXAMPLES * float(rng.integers(2))
    },
    "a little less than others": lambda mean, rng: {CORRECT: mean - NOISE},
    "less, and very sure of it": lambda mean, rng: {
        CORRECT: 0.5 * mean,
        NOISE_STD: 0.0,
    },
    "anything, and not sure at all": lambda mean, rng: {CORRECT: 0.0, NOISE_STD: 1e300},
}


@dataclass(frozen=True)
class Coverage:
    """How often the interval held against a lie, and how wide it was."""

    lie: str
    trials: int
    held: int
    width: float
    error: float


def coverage(lie: str, trials: int, seed: int) -> Coverage:
    """Evaluate many times, with a lie."""
    rng, source = np.random.default_rng([seed, 1]), SeededRandomness(seed)
    plan = PrivateEvaluation(NOISE).plan(EXAMPLES)
    held, widths, errors = 0, [], []
    for _ in range(trials):
        right = rng.integers(EXAMPLES // 2, EXAMPLES + 1, size=NODES - LIARS)
        told = []
        for count in right:
            data = examples(int(count), EXAMPLES - int(count))
            counts = private_counts(MODEL, data, plan, source, Question(MAX_LOSS))
            told.append(reported(counts, EXAMPLES))
        mean = float(np.mean([float(each[CORRECT]) for each in told]))  # type: ignore[arg-type]
        told += [{**told[0], **LIES[lie](mean, rng)} for _ in range(LIARS)]
        found = _concluded(told)
        true = float(np.median(right)) / EXAMPLES
        held += found["accuracy-low"] <= true <= found["accuracy-high"]
        widths.append(found["accuracy-high"] - found["accuracy-low"])
        errors.append(abs(found["accuracy"] - true))
    return Coverage(lie, trials, held, float(np.mean(widths)), float(np.mean(errors)))


def _concluded(told: Sequence[Metrics]) -> dict[str, float]:
    grid = InProcessGrid(ClientApp(), len(told))
    sent = [Message(RecordDict(), n, "evaluate") for n in grid.get_node_ids()]
    for i, message in enumerate(sent):
        set_id(message, f"asked-{i}")
    replies = [
        Message(RecordDict({"m": MetricRecord({**each, MARK: 1})}), reply_to=message)
        for message, each in zip(sent, told, strict=True)
    ]
    found = concluded(PrivateEvaluations(1, MAX_LOSS), sent, LIARS, replies)
    if found is None:
        raise AssertionError("more than 2f nodes answered")
    return {name: float(value) for name, value in found.items()}  # type: ignore[arg-type]


@dataclass(frozen=True)
class Composition:
    """Epsilon of steps and answers, ours and that of dp_accounting."""

    steps: int
    answers: int
    ours: float
    theirs: float


def composition(steps: int, answers: int) -> Composition:
    """Compose Poisson steps and answers about all examples with both accountants."""
    plan = PrivacyPlan(1.0, 1.0, 25, 1000, sampling="poisson")
    second = PrivateEvaluation(30.0).plan(1000)
    # Under replace-one it counts noise in units of half the sensitivity.
    accountant = PLDAccountant(
        dp.NeighboringRelation.REPLACE_ONE, value_discretization_interval=1e-4
    )
    step = dp.PoissonSampledDpEvent(25 / 1000, dp.GaussianDpEvent(2.0))
    accountant.compose(step, steps)
    if answers:
        accountant.compose(dp.GaussianDpEvent(60.0), answers)
    ours = epsilon([(plan, steps), (second, answers)], 1e-5)
    return Composition(steps, answers, ours, accountant.get_epsilon(1e-5))
