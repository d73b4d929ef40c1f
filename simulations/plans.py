"""The privacy plan of each node: the same for all, or the noise that its size needs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from logging import WARNING

from flwr.common import log
from hydra.utils import instantiate
from omegaconf import DictConfig

from flwr_safedshb.algorithm.answer_evaluation import PrivateEvaluation
from flwr_safedshb.algorithm.run_target import calibrate_plans
from flwr_safedshb.privacy.accounting import accountant
from flwr_safedshb.privacy.plan import PrivacyPlan, PrivacyStatement
from flwr_safedshb.privacy.target import PrivacyTarget

# A node whose epsilon is so many times that of most others is warned of.
_FAR = 3.0


@dataclass(frozen=True)
class Plans:
    """What a node releases: its steps, and its answers about models.

    Attributes
    ----------
    training : PrivacyPlan
    evaluation : PrivateEvaluation or None
    charges : tuple of (PrivacyPlan, int)
        All releases of a run.
    """

    training: PrivacyPlan
    evaluation: PrivateEvaluation | None
    charges: tuple[tuple[PrivacyPlan, int], ...]


def make_plans(cfg: DictConfig, size: int) -> Plans:
    """Return the plans of a node that holds `size` examples.

    For ``privacy.target_epsilon`` each has the noise that its own size needs. Examples
    that are held out pay for answers alone, and the others for steps alone.
    """
    asked, target = cfg.private_evaluation, cfg.privacy.get("target_epsilon")
    evaluation, held_out, answers = None, 0, 0
    if asked.every is not None:
        held_out = math.ceil(asked.held_out * size)
        answers = -(-(cfg.steps // cfg.local_steps) // asked.every)
        evaluation = PrivateEvaluation(asked.noise_multiplier, held_out)
    plan: PrivacyPlan = instantiate(cfg.privacy.plan, num_examples=size - held_out)
    evaluated = held_out or size
    if target is not None:
        limits = PrivacyTarget(
            target,
            cfg.privacy.delta,
            cfg.steps,
            plan.clip_norm,
            plan.batch_size,
            plan.sampling,
            plan.adjacency,
            plan.clipping,
            answers,
        )
        plan, evaluation = calibrate_plans(
            limits, plan.num_examples, evaluation, evaluated, separate=held_out > 0
        )
    charges = [(plan, cfg.steps)]
    if evaluation is not None:
        charges.append((evaluation.plan(evaluated), answers))
    if held_out:
        parts = ("trained", "held-out")
        charges = [
            (replace(each, part=f"{part}:{'0' * 16}"), count)
            for part, (each, count) in zip(parts, charges, strict=True)
        ]
    return Plans(plan, evaluation, tuple(charges))


@lru_cache(maxsize=256)
def state_privacy(
    charges: tuple[tuple[PrivacyPlan, int], ...], delta: float
) -> PrivacyStatement:
    """State the epsilon of all that a node releases."""
    return accountant.state_epsilon(charges, delta)


def compute_spent(cfg: DictConfig, size: int) -> float:
    """Return the epsilon that a node with so many examples will have spent."""
    return state_privacy(make_plans(cfg, size).charges, cfg.privacy.delta).epsilon


def warn_of_small_nodes(cfg: DictConfig, sizes: Sequence[int]) -> list[str]:
    """Warn of nodes whose epsilon is far above that of the others; return the words.

    The same noise hides one of few examples less than one of many.
    """
    if max(sizes) < _FAR * min(sizes) or cfg.privacy.get("target_epsilon") is not None:
        return []
    epsilons = {size: compute_spent(cfg, size) for size in {*sizes}}
    usual = statistics.median(epsilons[size] for size in sizes)
    words = [
        f"the node with {size} examples spends epsilon={epsilons[size]:.3g}, and most "
        f"others {usual:.3g} or less: set privacy.target_epsilon, so that every node "
        "has noise of its own, or leave it out"
        for size in sorted(epsilons)
        if epsilons[size] > _FAR * usual
    ]
    for line in words:
        log(WARNING, "%s", line)
    return words
