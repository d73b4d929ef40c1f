"""What an experiment is made of: data, model, clients and strategy, from its overrides.

An experiment is one string of Hydra overrides. What it makes is made once in a process.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import cast

from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn

from flwr_safedshb.algorithm.answer_evaluation import PrivateEvaluation
from flwr_safedshb.algorithm.norm_bound import NormBound
from flwr_safedshb.attacks import Attack, LabelFlip
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.randomness.noise import (
    Randomness,
    SecureRandomness,
    SeededRandomness,
)
from flwr_safedshb.strategy import SafeDSHB
from simulations.config import SettingsError, compose_config, resolve_config
from simulations.data import Examples, Federation, flip_labels, hash_data, split_data
from simulations.data.own import load_own
from simulations.models import (
    build_model,
    loss_and_targets,
)
from simulations.plans import make_plans
from simulations.schedules import make_schedule


def describe_identity(overrides: str) -> dict[str, object]:
    """Return all that decides the result of an experiment, its data included."""
    data = compose_config(overrides).data
    return {**resolve_config(overrides), "data_sha256": hash_data(instantiate(data))}


@dataclass(frozen=True)
class Share:
    """What the client of one node is made of; the model is shared by all of them."""

    model: nn.Module
    loss: nn.Module
    examples: Examples
    plan: PrivacyPlan
    evaluation: PrivateEvaluation | None
    weight_decay: float
    max_epsilon: float | None
    delta: float
    randomness: Randomness


@lru_cache(maxsize=4096)
def make_share(overrides: str, index: int) -> Share:
    """Return the share of node `index`, made once: clients are made for each message.

    Adversaries who need data hold copies of what honest nodes hold.
    """
    cfg = compose_config(overrides)
    data = load_federation(overrides)
    examples = data.shards[index % len(data.shards)]
    if index >= len(data.shards) and isinstance(make_attack(cfg), LabelFlip):
        examples = flip_labels(examples, data.num_classes)
    return _share(cfg, _model_of_clients(overrides), examples, data.num_classes)


@lru_cache(maxsize=2)
def make_own_share(overrides: str, path: str) -> Share:
    """Return the share of a node whose examples are in a file of its own."""
    cfg = compose_config(overrides)
    own = load_own(Path(path))
    make = instantiate(cfg.model, _partial_=True)
    shape = tuple(own.examples[0].shape[1:])
    model = build_model(make, shape, own.num_classes, cfg.seed)
    return _share(cfg, model, own.examples, own.num_classes)


def forget_shares() -> None:
    """Let the next run make its own: the files they come from may have changed."""
    for made in (make_share, make_own_share, build_untrained, _model_of_clients):
        made.cache_clear()


def _share(
    cfg: DictConfig, model: nn.Module, examples: Examples, num_classes: int
) -> Share:
    plans = make_plans(cfg, len(examples[1]))
    evaluation = plans.evaluation
    if evaluation is not None:
        evaluation = replace(evaluation, num_classes=num_classes)
    loss, targets = loss_and_targets(model, examples)
    return Share(
        model=model,
        loss=loss,
        examples=(examples[0], targets),
        plan=plans.training,
        evaluation=evaluation,
        weight_decay=float(cfg.weight_decay),
        max_epsilon=cfg.engine.get("max_epsilon"),
        delta=cfg.privacy.delta,
        randomness=SeededRandomness(cfg.seed)
        if cfg.engine.seeded_noise
        else SecureRandomness(),
    )


def load_federation(overrides: str) -> Federation:
    """Return the data of an experiment; the honest nodes share all of them."""
    cfg = compose_config(overrides)
    holders = cfg.num_nodes - (cfg.num_malicious_nodes if is_attacked(cfg) else 0)
    data = split_data(instantiate(cfg.data), instantiate(cfg.split), holders, cfg.seed)
    data.check_batch_size(cfg.privacy.plan.batch_size)
    return data


@lru_cache(maxsize=2)
def build_untrained(overrides: str) -> nn.Module:
    """Return the model of an experiment before its first step; leave it so."""
    cfg = compose_config(overrides)
    data = load_federation(overrides)
    make = instantiate(cfg.model, _partial_=True)
    return build_model(make, data.input_shape, data.num_classes, cfg.seed)


@lru_cache(maxsize=2)
def _model_of_clients(overrides: str) -> nn.Module:
    # Clients load weights into it.
    return copy.deepcopy(build_untrained(overrides))


def make_strategy(overrides: str) -> SafeDSHB:
    """Return the server's half of an experiment."""
    cfg = compose_config(overrides)
    rule = instantiate(cfg.aggregation)
    rates = make_schedule(
        cfg, load_federation(overrides), build_untrained(overrides), rule
    )
    return SafeDSHB(
        rule,
        cfg.num_malicious_nodes,
        server_learning_rate=rates.learning_rate,
        momentum=rates.momentum,
        output=cfg.output,
        local_steps=cfg.local_steps,
        norm_bound=make_norm_bound(cfg, load_federation(overrides).sizes),
        evaluate_every=cfg.private_evaluation.every,
        evaluate_max_loss=cfg.private_evaluation.max_loss,
        evaluate_per_class=cfg.private_evaluation.per_class,
        min_available_nodes=cfg.num_nodes,
        node_timeout=cfg.engine.get("node_timeout", 600),
        authenticated_nodes=cfg.engine.get("authenticated_nodes", False),
        seed=cfg.seed,
        checkpoint=cfg.checkpoint,
        checkpoint_every=cfg.checkpoint_every,
        run_settings=describe_identity(overrides),
    )


def make_norm_bound(cfg: DictConfig, sizes: Iterable[int]) -> NormBound | None:
    """Return the bound on honest replies of nodes that hold so many examples, if any.

    The plans of an experiment are public: every node composes them from its overrides.
    """
    if cfg.norm_confidence is None:
        return None
    own_noise = cfg.privacy.get("target_epsilon") is not None
    if own_noise and cfg.engine.name == "deployment":
        raise SettingsError(
            f"norm_confidence={cfg.norm_confidence} needs noise that is public, and "
            "with privacy.target_epsilon each node of a deployment has its own; leave "
            "one of them out"
        )
    plans = [make_plans(cfg, size).training for size in {*sizes}]
    if strange := {plan.sampling for plan in plans} - {"fixed", "whole", "poisson"}:
        raise SettingsError(
            f"norm_confidence={cfg.norm_confidence} needs batches whose size is known; "
            f"privacy.plan.sampling={min(strange)} is none of fixed, whole, poisson"
        )
    return NormBound(
        clip_norm=max(plan.clip_norm for plan in plans),
        noise_std=max(plan.noise_std for plan in plans),
        weight_decay=cfg.weight_decay,
        poisson_batch_size=min(
            (plan.batch_size for plan in plans if plan.sampling == "poisson"),
            default=None,
        ),
        confidence=cfg.norm_confidence,
    )


def is_attacked(cfg: DictConfig) -> bool:
    """Whether somebody attacks."""
    return "_target_" in cfg.attack


def make_attack(cfg: DictConfig) -> Attack:
    """Return the attack of an attacked experiment."""
    return cast(Attack, instantiate(cfg.attack))
