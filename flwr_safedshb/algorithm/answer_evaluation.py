"""Private evaluation on a node: noisy counts of right answers, charged like a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from flwr_safedshb.algorithm import wire
from flwr_safedshb.algorithm.budget import PrivacyBudget
from flwr_safedshb.algorithm.model_arrays import load_weights
from flwr_safedshb.algorithm.refusal import RefusedError
from flwr_safedshb.algorithm.requests import EvaluateRequest
from flwr_safedshb.algorithm.step import GradientSource
from flwr_safedshb.algorithm.wire import Arrays
from flwr_safedshb.privacy.accounting import ranges
from flwr_safedshb.privacy.evaluation import (
    Counts,
    IsCorrect,
    Question,
    is_correct,
    private_counts,
)
from flwr_safedshb.privacy.losses import Loss
from flwr_safedshb.privacy.owners import PrivateData
from flwr_safedshb.privacy.plan import PrivacyPlan, Unit

Metrics = dict[str, int | float | list[int] | list[float]]

# Seeded noise of evaluations uses step numbers that no run reaches.
_FIRST_STEP_OF_NOISE = 2**40
_MAX_CLASSES = 10_000


@dataclass(frozen=True)
class PrivateEvaluation:
    """Settings of a client's private evaluations.

    Attributes
    ----------
    noise_multiplier : float, optional
        Standard deviation of the noise, in units of the sensitivity to one example. A
        client with a `PrivacyTarget` finds it for examples that are held out.
    held_out : int
        How many examples are held out of training; only these are evaluated. With 0
        all examples are trained on and evaluated, and each is charged for both. With a
        plan for persons it counts persons, and so do the answers.
    num_classes : int, optional
        Number of classes of the task; needed to answer by class.
    right : callable (outputs, target) -> bool
        Whether the outputs for one example are right; by default, whether the largest
        output is the target's.
    """

    noise_multiplier: float | None = None
    held_out: int = 0
    num_classes: int | None = None
    right: IsCorrect = field(default=is_correct)

    def __post_init__(self) -> None:
        if self.noise_multiplier is not None:
            ranges.NOISE_MULTIPLIER.check("noise_multiplier", self.noise_multiplier)
        for name, least, most in (
            ("held_out", 0, ranges.MAX_EXAMPLES),
            ("num_classes", 2, _MAX_CLASSES),
        ):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is None and name == "num_classes":
                continue
            if not whole or not least <= value <= most:
                raise ValueError(
                    f"{name}={ranges.shorten_value(value)} must be an integer from "
                    f"{least} to {most}"
                )

    def plan(self, num_examples: int, unit: Unit = "example") -> PrivacyPlan:
        """Return the plan of one evaluation of `num_examples` examples, or persons."""
        noise, m = self.noise_multiplier, num_examples
        if noise is None:
            raise ValueError(
                "PrivateEvaluation() needs noise_multiplier beside a PrivacyPlan; a "
                "PrivacyTarget finds it for examples that are held out"
            )
        return PrivacyPlan(1.0, noise, m, m, sampling="whole", unit=unit)


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Answers requests for private evaluations on a client.

    Attributes
    ----------
    settings : PrivateEvaluation
    dataset : Examples or OwnedExamples
        The examples that are evaluated.
    model, loss : nn.Module, callable
    source : GradientSource
        The source of the client's training gradients; its model and randomness are
        used here, too.
    """

    settings: PrivateEvaluation
    dataset: PrivateData
    model: nn.Module
    loss: Loss
    source: GradientSource

    def answer(
        self, request: EvaluateRequest, weights: Arrays, budget: PrivacyBudget
    ) -> Metrics:
        """Charge the budget, count right answers, add noise and return the metrics.

        Raises
        ------
        RefusedError
            If the request asks for classes that the client does not have, or the
            evaluation exceeds the budget. Nothing is charged then.
        """
        plan, num_classes = budget.evaluation_plan, self.settings.num_classes
        if plan is None:
            raise RefusedError("this client does not evaluate models on its data")
        if request.per_class and num_classes is None:
            raise RefusedError("this client does not evaluate by class")
        self.source.gradients.prepare(*self.dataset.like)
        budget.charge_evaluation(request)
        load_weights(self.source.trained, weights)
        randomness = self.source.randomness.for_step(
            self.source.node, _FIRST_STEP_OF_NOISE + request.number
        )
        counts = private_counts(
            (self.model, self.loss),
            self.dataset,
            plan,
            randomness,
            Question(request.max_loss, num_classes if request.per_class else None),
            self.settings.right,
        )
        return make_metrics(counts, plan.num_examples)


def make_metrics(counts: Counts, num_examples: int) -> Metrics:
    """Return the metrics of a reply: the noisy sums, and public numbers."""
    metrics: Metrics = {
        wire.NUM_EXAMPLES: num_examples,
        wire.CORRECT: counts.correct,
        wire.LOSS: counts.loss,
        wire.NOISE_STD: counts.noise_std,
    }
    if counts.classes is not None:
        metrics.update(zip(wire.CLASS_SUMS, counts.classes.tolist(), strict=True))
    return metrics
