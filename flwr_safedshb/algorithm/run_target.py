"""Turn a node's privacy target into its plans, and keep a run within the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from flwr_safedshb.algorithm.answer_evaluation import PrivateEvaluation
from flwr_safedshb.algorithm.budget import RunTerms
from flwr_safedshb.algorithm.refusal import RefusedError
from flwr_safedshb.algorithm.requests import TrainRequest
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.target import PrivacyTarget

NodePlans = tuple[PrivacyPlan, PrivateEvaluation | None]


# Clients are made anew for every message.
@lru_cache(maxsize=256)
def calibrate_plans(
    target: PrivacyTarget,
    num_trained: int,
    evaluation: PrivateEvaluation | None = None,
    num_evaluated: int = 0,
    *,
    separate: bool = False,
) -> NodePlans:
    """Return the plan of a node's steps, and its evaluation with its noise filled in.

    Parameters
    ----------
    target : PrivacyTarget
    num_trained, num_evaluated : int
        Examples that train, and that are evaluated.
    evaluation : PrivateEvaluation, optional
    separate : bool
        Whether no example is both trained on and evaluated. Each part may then spend
        the target on its own use. Otherwise all examples pay for both.

    Raises
    ------
    ValueError
        If no noise meets the target; it names the remedy.
    """
    if evaluation is None:
        return target.make_plan(num_trained), None
    count = target.evaluations
    if not count:
        raise ValueError(
            "the client evaluates privately, and PrivacyTarget(evaluations=0) leaves "
            "nothing for that; set evaluations to the most that a run asks for: rounds "
            "divided by evaluate_every, rounded up"
        )
    if evaluation.noise_multiplier is None:
        if not separate:
            raise ValueError(
                "PrivateEvaluation() needs noise_multiplier where the examples that "
                "train are evaluated, too: it decides how much of the target is left "
                "for training"
            )
        whole = replace(
            target, steps=count, clip_norm=1.0, batch_size=None, sampling="whole"
        )
        noise = whole.make_plan(num_evaluated).noise_multiplier
        evaluation = replace(evaluation, noise_multiplier=noise)
    answers = (evaluation.plan(num_evaluated, target.unit), count)
    if separate:
        _check_answers(target, *answers)
        return target.make_plan(num_trained), evaluation
    return target.make_plan(num_trained, [answers]), evaluation


def make_terms(
    target: PrivacyTarget, terms: RunTerms, node_config: Mapping[str, object]
) -> RunTerms:
    """Return the terms of a run with what its target adds.

    A node whose owner set no budget keeps the target as the budget of its ledger.
    """
    if terms.delta not in (None, target.delta):
        raise ValueError(
            f"delta={terms.delta} of the client and delta={target.delta} of the "
            "PrivacyTarget differ; give the target's alone"
        )
    limit = terms.max_epsilon
    if (
        limit is None
        and "state-dir" in node_config
        and "max-epsilon" not in node_config
    ):
        limit = target.epsilon
    return replace(terms, delta=target.delta, max_epsilon=limit)


def check_length(target: PrivacyTarget, request: TrainRequest) -> None:
    """Refuse a run that is longer than the target allows, before it is charged.

    Raises
    ------
    RefusedError
    """
    steps = request.last_step + 1
    if request.run is not None:
        steps = max(steps, request.run.steps)
        if request.run.evaluations > target.evaluations:
            raise RefusedError(
                f"the run asks for {request.run.evaluations} private evaluations, and "
                f"the noise of this node was made for evaluations={target.evaluations} "
                "of its PrivacyTarget; set as many"
            )
    if steps > target.steps:
        raise RefusedError(
            f"the run takes {steps} steps, and the noise of this node was made for "
            f"steps={target.steps} of its PrivacyTarget; set steps={steps}, or ask for "
            "fewer rounds"
        )


def _check_answers(target: PrivacyTarget, plan: PrivacyPlan, count: int) -> None:
    """Refuse evaluations that cost the held-out examples more than the target."""
    spent = plan.epsilon(count, target.delta)
    if spent > target.epsilon:
        raise ValueError(
            f"noise_multiplier={plan.noise_multiplier:g} of PrivateEvaluation costs "
            f"the held-out examples epsilon={spent:.3g}, above the target of "
            f"{target.epsilon:g}; raise it, or leave it out to have it found"
        )
