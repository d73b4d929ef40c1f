"""Whether an experiment can run, asked before anything has started."""

from __future__ import annotations

import numpy as np
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from flwr_safedshb.server.schedules import rates_at
from simulations.config import (
    SettingsError,
    check_values,
    composed,
    explained,
    keys,
)
from simulations.experiment import (
    attack_of,
    attacked,
    federation,
    forget_shares,
    share,
    strategy_of,
    untrained,
)
from simulations.overrides import CONF


def check(overrides: str) -> None:
    """Make everything that an experiment needs, and try what may be refused later.

    Raises
    ------
    SettingsError
        That says in one line which setting is wrong, and why.
    """
    check_values(overrides)
    forget_shares()
    cfg = composed(overrides)
    with explained("privacy.plan"):
        instantiate(cfg.privacy.plan, num_examples=10**9)
    with explained("data"):
        data = federation(overrides)
    with explained("model"):
        untrained(overrides)
    with explained():
        strategy = strategy_of(overrides)
        for step in range(cfg.steps):
            rates_at(strategy.server_learning_rate, strategy.momentum, step)
        strategy.aggregation(np.zeros((cfg.num_nodes, 1)), cfg.num_malicious_nodes)
        if attacked(cfg):
            attack_of(cfg)
        share(overrides, 0)
        if "_target_" in cfg.logger:
            instantiate(cfg.logger)
    _check_engine(cfg, min(data.sizes))


def check_study(overrides: str) -> None:
    """Refuse settings that the study of an experiment cannot have, or does not use."""
    for name in keys(overrides):
        if name.split(".")[0] not in ("experiment", "study", "seed", "hydra"):
            raise SettingsError(
                f"{name} is not used: the experiment is a study of its own, with its "
                f"settings under study; leave it out, or try study.{name}"
            )
    check_values(overrides)
    with explained("study"):
        instantiate(composed(overrides).study)


def _check_engine(cfg: DictConfig, num_examples: int) -> None:
    engine = cfg.engine
    path = CONF / "engine" / f"{engine.name}.yaml"
    names = sorted(path.stem for path in path.parent.glob("*.yaml"))
    if engine.name not in names:
        raise SettingsError(f"engine={engine.name} must be one of {', '.join(names)}")
    if missing := OmegaConf.load(path).keys() - engine.keys():
        raise SettingsError(
            f"engine.name={engine.name} needs engine.{min(missing)}; choose "
            f"engine={engine.name} in its place"
        )
    if engine.name != "deployment":
        if not engine.seeded_noise:
            raise SettingsError(
                "engine.seeded_noise=false: simulated nodes keep no privacy budget and "
                "refuse noise that needs one; leave it out, or use engine=deployment"
            )
        return
    if engine.seeded_noise:
        raise SettingsError(
            "engine.seeded_noise=true: the nodes of a deployment refuse noise that can "
            "be repeated; leave it out, or use another engine"
        )
    if engine.max_epsilon is None:
        raise SettingsError("engine.max_epsilon=null: nodes need a budget; give it")
    with explained():
        plan = instantiate(cfg.privacy.plan, num_examples=num_examples)
        spent = plan.epsilon(cfg.steps, cfg.privacy.delta)
    if not spent <= engine.max_epsilon:
        raise SettingsError(
            f"steps={cfg.steps} spend epsilon={spent:.4g}, and every node stops at "
            f"engine.max_epsilon={engine.max_epsilon:g}; raise it, or lower steps"
        )
