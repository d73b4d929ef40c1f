"""Intervals with liars among the nodes, and epsilon by another accountant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import dp_accounting as dp
import numpy as np
from dp_accounting.pld import PLDAccountant
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_safedshb.algorithm.answer_evaluation import (
    Metrics,
    PrivateEvaluation,
    make_metrics,
)
from flwr_safedshb.algorithm.private_evaluation import (
    EvaluationSchedule,
    aggregate_evaluation,
)
from flwr_safedshb.algorithm.wire import CORRECT, MOMENTUM_TAG, NOISE_STD
from flwr_safedshb.flower.compat import set_message_id
from flwr_safedshb.privacy.accounting.accountant import compute_epsilon
from flwr_safedshb.privacy.evaluation import Question, private_counts
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.randomness.noise import SeededRandomness
from flwr_safedshb.simulation.in_process import InProcessGrid
from simulations.studies.answers.data import MAX_LOSS, MODEL, examples

NODES, LIARS = 7, 2
# Sizes of the honest nodes; liars claim the last.
SIZES = (20, 30, 40, 60, 150)
NOISE = 2.0
Lie = Callable[[float, np.random.Generator], dict[str, float]]
# What liars say, who know the share that the honest nodes say is right, on average.
LIES: dict[str, Lie] = {
    "nothing is right": lambda mean, rng: {CORRECT: 0.0},
    "everything is right": lambda mean, rng: {CORRECT: float(SIZES[-1])},
    "one the one, one the other": lambda mean, rng: {
        CORRECT: SIZES[-1] * float(rng.integers(2))
    },
    "a little less than others": lambda mean, rng: {CORRECT: SIZES[-1] * mean - NOISE},
    "less, and very sure of it": lambda mean, rng: {
        CORRECT: 0.5 * mean * SIZES[-1],
        NOISE_STD: 0.0,
    },
    "anything, and not sure at all": lambda mean, rng: {CORRECT: 0.0, NOISE_STD: 1e300},
}


@dataclass(frozen=True)
class Coverage:
    """How often the interval held against a lie, and how wide it was.

    `pooled` counts how often it held the pooled accuracy, for which it is not made.
    """

    lie: str
    trials: int
    held: int
    pooled: int
    width: float
    error: float


def coverage(lie: str, trials: int, seed: int) -> Coverage:
    """Evaluate many times, with a lie, over unequal nodes whose accuracies differ."""
    rng, source = np.random.default_rng([seed, 1]), SeededRandomness(seed)
    held, pooled, widths, errors = 0, 0, [], []
    for _ in range(trials):
        # The larger nodes have the harder examples.
        right = np.array([rng.integers(s // 3, s + 1) for s in SIZES])
        right[-1] = rng.integers(SIZES[-1] // 2)
        told = []
        for count, size in zip(right.tolist(), SIZES, strict=True):
            plan = PrivateEvaluation(NOISE).plan(size)
            data = examples(count, size - count)
            counts = private_counts(MODEL, data, plan, source, Question(MAX_LOSS))
            told.append(make_metrics(counts, size))
        said = [float(t[CORRECT]) / s for t, s in zip(told, SIZES, strict=True)]  # type: ignore[arg-type]
        mean = float(np.mean(said))
        told += [{**told[-1], **LIES[lie](mean, rng)} for _ in range(LIARS)]
        found = _concluded(told)
        true = float(np.median(right / np.array(SIZES)))
        low, high = (found[f"median-node-accuracy-{end}"] for end in ("low", "high"))
        held += bool(low <= true <= high)
        pooled += bool(low <= right.sum() / sum(SIZES) <= high)
        widths.append(high - low)
        errors.append(abs(found["median-node-accuracy"] - true))
    figures = float(np.mean(widths)), float(np.mean(errors))
    return Coverage(lie, trials, held, pooled, *figures)


def _concluded(told: Sequence[Metrics]) -> dict[str, float]:
    grid = InProcessGrid(ClientApp(), len(told))
    sent = [Message(RecordDict(), n, "evaluate") for n in grid.get_node_ids()]
    for i, message in enumerate(sent):
        set_message_id(message, f"asked-{i}")
    replies = [
        Message(
            RecordDict({"m": MetricRecord({**each, MOMENTUM_TAG: 1})}), reply_to=message
        )
        for message, each in zip(sent, told, strict=True)
    ]
    found = aggregate_evaluation(EvaluationSchedule(1, MAX_LOSS), sent, LIARS, replies)
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
    ours = compute_epsilon([(plan, steps), (second, answers)], 1e-5)
    return Composition(steps, answers, ours, accountant.get_epsilon(1e-5))
