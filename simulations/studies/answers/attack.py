"""An attack on answers, and on answers with a planted defect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from flwr_safedshb.algorithm.answer_evaluation import PrivateEvaluation
from flwr_safedshb.audit.epsilon_bound import epsilon_lower_bound
from flwr_safedshb.privacy.evaluation import Counts, Question, private_counts
from flwr_safedshb.privacy.randomness.noise import SeededRandomness
from simulations.studies.answers.data import MAX_LOSS, MODEL, examples

DELTA = 0.05
CONFIDENCE = 0.999
Mechanism = Callable[[float, SeededRandomness, Question], Counts]


def _honest(
    right: float, source: SeededRandomness, question: Question, noise: float = 1.0
) -> Counts:
    plan = PrivateEvaluation(noise).plan(1)
    return private_counts(
        MODEL, examples(right > 0, right <= 0), plan, source, question
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


@dataclass(frozen=True)
class Attacked:
    """What was accounted for one answer, and what an attacker measured."""

    mechanism: str
    per_class: bool
    measured: float
    accounted: float

    @property
    def holds(self) -> bool:
        """Whether the measurement leaves the accounted epsilon standing."""
        return self.measured <= self.accounted


def attacked(name: str, per_class: bool, trials: int, seed: int) -> Attacked:
    """Tell two datasets apart whose one example is right in one, wrong in the other."""
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
    return Attacked(name, per_class, measured, accounted)
