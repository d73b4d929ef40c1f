"""Private evaluation, attacked: ``python -m simulations.study answers``.

Three questions. Does the interval that the server states hold, with liars among the
nodes? Is the epsilon of training and answers together what another accountant says? And
does an attacker who knows everything but one example learn more from answers than is
accounted for, or from answers with a planted defect, so that the attack is worth its
name?
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import dp_accounting as dp
import numpy as np
import torch
from dp_accounting.pld import PLDAccountant
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

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
from flwr_safedshb.audit.epsilon_bound import epsilon_lower_bound
from flwr_safedshb.flower.compat import set_message_id
from flwr_safedshb.privacy.accounting.accountant import compute_epsilon
from flwr_safedshb.privacy.evaluation import Counts, Question, private_counts
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.randomness.noise import SeededRandomness
from flwr_safedshb.simulation.in_process import InProcessGrid
from simulations.results.tables import Table
from simulations.study import Runs, Section, Study, grid

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
MAX_LOSS = 4.0


class Identity(nn.Module):
    """Scores that are the inputs themselves, so that data say what is right."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs."""
        return inputs


MODEL = (Identity(), nn.CrossEntropyLoss(reduction="none"))


def make_examples(right: int, wrong: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return examples of class 0 of which the model gets so many right."""
    scores = [[30.0, 0.0]] * right + [[0.0, 30.0]] * wrong
    return torch.tensor(scores), torch.zeros(right + wrong, dtype=torch.int64)


DELTA = 0.05
CONFIDENCE = 0.999
Mechanism = Callable[[float, SeededRandomness, Question], Counts]


def _honest(
    right: float, source: SeededRandomness, question: Question, noise: float = 1.0
) -> Counts:
    plan = PrivateEvaluation(noise).plan(1)
    return private_counts(
        MODEL, make_examples(right > 0, right <= 0), plan, source, question
    )


def _unclipped(right: float, source: SeededRandomness, question: Question) -> Counts:
    """Let a loss count for more than the greatest that counts."""
    found = _honest(right, source, question)
    return found if right > 0 else replace(found, loss=found.loss + 1.0)


def _quiet_loss(right: float, source: SeededRandomness, question: Question) -> Counts:
    """Add noise to the right answers alone."""
    exact = _honest(right, SeededRandomness(0), question, 1e-6)
    return replace(_honest(right, source, question), loss=exact.loss)


def _twice(right: float, source: SeededRandomness, question: Question) -> Counts:
    """Count an example for two."""
    found, exact = (
        _honest(right, SeededRandomness(0) if i else source, question, 1e-6 if i else 1)
        for i in (0, 1)
    )
    return replace(
        found, correct=found.correct + exact.correct, loss=found.loss + exact.loss
    )


def _half(right: float, source: SeededRandomness, question: Question) -> Counts:
    return _honest(right, source, question, 0.5)


def _one_sum(right: float, source: SeededRandomness, question: Question) -> Counts:
    """Make noise for one sum, and release two."""
    return _honest(right, source, question, 1.0 / question.sensitivity)


MECHANISMS: dict[str, Mechanism] = {
    "as it is": _honest,
    "defect: half the noise": _half,
    "defect: noise for one of two sums": _one_sum,
    "defect: losses are not clipped": _unclipped,
    "defect: no noise in the losses": _quiet_loss,
    "defect: an example counts twice": _twice,
}


def measure(
    question: str,
    seed: int,
    lie: str = "",
    answers: int = 0,
    mechanism: str = "",
    per_class: bool = False,
    evaluations: int = 167,
    trials: int = 6000,
) -> dict[str, object]:
    """Ask one of the three questions."""
    logging.getLogger("flwr").setLevel(logging.WARNING)  # a line for each answer
    if question == "interval":
        return cover(lie, evaluations, seed + [*LIES].index(lie))
    if question == "epsilon":
        return compose(400, answers)
    return attack(mechanism, per_class, trials, seed)


def cover(lie: str, trials: int, seed: int) -> dict[str, object]:
    """Evaluate many times, with a lie, over unequal nodes whose accuracies differ.

    Returns
    -------
    dict
        How often the interval held, how often it held the pooled accuracy, for which it
        is not made, its mean width, and the mean error of the median.
    """
    rng, source = np.random.default_rng([seed, 1]), SeededRandomness(seed)
    held, pooled, widths, errors = 0, 0, [], []
    for _ in range(trials):
        # The larger nodes have the harder examples.
        right = np.array([rng.integers(s // 3, s + 1) for s in SIZES])
        right[-1] = rng.integers(SIZES[-1] // 2)
        told = []
        for count, size in zip(right.tolist(), SIZES, strict=True):
            plan = PrivateEvaluation(NOISE).plan(size)
            data = make_examples(count, size - count)
            counts = private_counts(MODEL, data, plan, source, Question(MAX_LOSS))
            told.append(make_metrics(counts, size))
        said = [float(t[CORRECT]) / s for t, s in zip(told, SIZES, strict=True)]  # type: ignore[arg-type]
        mean = float(np.mean(said))
        told += [{**told[-1], **LIES[lie](mean, rng)} for _ in range(LIARS)]
        found = _conclude(told)
        true = float(np.median(right / np.array(SIZES)))
        low, high = (found[f"median-node-accuracy-{end}"] for end in ("low", "high"))
        held += bool(low <= true <= high)
        pooled += bool(low <= right.sum() / sum(SIZES) <= high)
        widths.append(high - low)
        errors.append(abs(found["median-node-accuracy"] - true))
    return {
        "trials": trials,
        "held": held,
        "pooled": pooled,
        "width": float(np.mean(widths)),
        "error": float(np.mean(errors)),
        "holds": held >= 0.95 * trials,
    }


def _conclude(told: Sequence[Metrics]) -> dict[str, float]:
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


def compose(steps: int, answers: int) -> dict[str, object]:
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
    theirs = accountant.get_epsilon(1e-5)
    return {
        "ours": ours,
        "theirs": theirs,
        "holds": abs(ours - theirs) <= 0.01 * theirs,
    }


def attack(name: str, per_class: bool, trials: int, seed: int) -> dict[str, object]:
    """Tell two datasets apart whose one example is right in one, wrong in the other.

    Returns
    -------
    dict
        ``measured``, a lower bound on epsilon, and ``accounted``.
    """
    question = Question(MAX_LOSS, 2 if per_class else None)
    source = SeededRandomness(seed)
    samples = []
    for right in (0.0, 1.0):
        found = [MECHANISMS[name](right, source, question) for _ in range(trials)]
        columns = [[each.correct, -each.loss] for each in found]
        if per_class:
            # Right answers of the class hold half of its number, whose noise is known.
            extra = [each.classes for each in found if each.classes is not None]
            for row, by_class in zip(columns, extra, strict=True):
                centred = by_class[1:, 0] - by_class[0, 0] / 2
                row += [float(centred[0]), -float(centred[1])]
        samples.append(np.array(columns))
    # All sums together, or the right answers alone, or the losses alone.
    looks = (slice(None), slice(0, 1), slice(1, 2))
    sure = 1.0 - (1.0 - CONFIDENCE) / len(looks)
    wrong, right_ones = samples
    measured = max(
        epsilon_lower_bound(
            wrong[:, look].sum(axis=1), right_ones[:, look].sum(axis=1), DELTA, sure
        )
        for look in looks
    )
    accounted = PrivateEvaluation(1.0).plan(1).epsilon(1, DELTA)
    caught = measured > accounted
    return {
        "measured": measured,
        "accounted": accounted,
        "verdict": "caught" if caught else "holds",
        "holds": caught == (name != "as it is"),
    }


def report(runs: Runs[Any]) -> Iterator[Section]:
    """Yield a table for each question."""
    asked = {
        question: {case.labels["of"]: run["metrics"] for case, run in some.items()}
        for question, some in runs.by("question").items()
    }
    if covered := asked.get("interval"):
        trials = sum(one["trials"] for one in covered.values())
        held = sum(one["held"] for one in covered.values()) / trials
        heads = ["what liars say", "held", "pooled accuracy inside", "mean width"]
        rows = []
        for lie, c in covered.items():
            counts = [f"{c[key]} of {c['trials']}" for key in ("held", "pooled")]
            rows.append([lie, *counts, f"{c['width']:.3f}", f"{c['error']:.3f}"])
        yield Section(
            "The interval, with liars",
            f"The interval held in {100 * held:.1f} % of {trials} evaluations: {NODES} "
            f"nodes, {LIARS} of them liars, the others with "
            f"{', '.join(map(str, SIZES))} examples and accuracies that differ, noise "
            f"{NOISE:g}. The pooled accuracy, which it is not about, was inside less "
            "often.",
            Table([*heads, "mean error of the median"], rows),
        )
    if composed := asked.get("epsilon"):
        rows = [
            ["400", answers, f"{c['ours']:.4f}", f"{c['theirs']:.4f}"]
            for answers, c in composed.items()
        ]
        yield Section(
            "Epsilon of steps and answers",
            "At delta = 1e-5, of Poisson steps (m = 1000, b = 25, noise 1) and answers "
            "about all 1000 examples (noise 30), replace-one.",
            Table(["steps", "answers", "ours", "dp_accounting"], rows),
        )
    if attacked := asked.get("attack"):
        heads = ["mechanism", "measured", "accounted", "verdict"]
        rows = [
            [name, f">= {a['measured']:.3f}", f"<= {a['accounted']:.3f}", a["verdict"]]
            for name, a in attacked.items()
        ]
        yield Section(
            "One answer, attacked",
            f"With noise 1, at delta = {DELTA:g} (bound from below, 99.9 % sure).",
            Table(heads, rows),
        )


def is_any_wrong(runs: Runs[Any]) -> bool:
    """Return True if an answer is not what it should be."""
    covered = [r["metrics"] for r in runs.where(question="interval").values()]
    others = [r for c, r in runs.items() if c.labels["question"] != "interval"]
    held = sum(one["held"] for one in covered)
    enough = held >= 0.95 * sum(one["trials"] for one in covered)
    return not (enough and all(run["metrics"]["holds"] for run in others))


def _as_axis(key: str, values: Sequence[object]) -> dict[str, str]:
    return {str(value): shlex.quote(f"{key}={value}") for value in values}


study = Study(
    "answers",
    "Private evaluation, attacked",
    "Do the intervals and the epsilon of private evaluation hold?",
    [
        *grid(question=["interval"], of=_as_axis("lie", [*LIES])),
        *grid(question=["epsilon"], of=_as_axis("answers", (0, 1, 10, 40))),
        *grid(question=["attack"], of=_as_axis("mechanism", [*MECHANISMS])),
        *grid(
            question=["attack"],
            of={"as it is, by class": "mechanism='as it is' per_class=true"},
        ),
    ],
    seeds=(1,),
    report=report,
    measure=measure,
    page="docs/federations.md",
    failed=is_any_wrong,
)
