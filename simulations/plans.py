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
from flwr_safedshb.privacy.accounting import accountant
from flwr_safedshb.privacy.plan import PrivacyPlan, PrivacyStatement

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
    held_out = 0 if asked.every is None else math.ceil(asked.held_out * size)
    plan: PrivacyPlan = instantiate(cfg.privacy.plan, num_examples=size - held_out)
    evaluation, answers = None, 0
    if asked.every is not None:
        rounds = cfg.steps // cfg.local_steps
        answers = -(-rounds // asked.every)
        noise = asked.noise_multiplier
        if noise is None:
            whole = PrivateEvaluation(1.0).plan(held_out)
            noise = _calibrated(
                whole, target, cfg.privacy.delta, answers
            ).noise_multiplier
        evaluation = PrivateEvaluation(noise, held_out)
    beside: tuple[tuple[PrivacyPlan, int], ...] = ()
    if evaluation is not None:
        beside = ((evaluation.plan(held_out or size), answers),)
    if target is not None:
        others = () if held_out else beside
        plan = _calibrated(plan, target, cfg.privacy.delta, cfg.steps, others)
    charges = [(plan, cfg.steps), *beside]
    if held_out:
        parts = ("trained", "held-out")
        charges = [
            (replace(each, part=f"{part}:{'0' * 16}"), count)
            for part, (each, count) in zip(parts, charges, strict=True)
        ]
    return Plans(plan, evaluation, tuple(charges))


@lru_cache(maxsize=256)
def _calibrated(
    plan: PrivacyPlan,
    target: float,
    delta: float,
    steps: int,
    beside: tuple[tuple[PrivacyPlan, int], ...] = (),
) -> PrivacyPlan:
    shape = {k: v for k, v in plan.to_dict().items() if k != "noise_multiplier"}
    return PrivacyPlan.calibrate(target, delta, steps, **shape, beside=beside)  # type: ignore[arg-type]


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
