"""Whether an experiment can run, asked before anything has started."""

from __future__ import annotations

import inspect
from types import UnionType
from typing import get_args

import numpy as np
from hydra.utils import get_method, instantiate
from omegaconf import DictConfig, OmegaConf

from flwr_safedshb.aggregation import Average
from flwr_safedshb.algorithm.schedules import rates_at
from flwr_safedshb.attacks import Attack
from simulations.config import (
    SettingsError,
    check_values,
    compose_config,
    explain_errors,
    list_keys,
)
from simulations.experiment import (
    build_untrained,
    forget_shares,
    is_attacked,
    load_federation,
    make_attack,
    make_share,
    make_strategy,
)
from simulations.overrides import CONF
from simulations.plans import compute_spent, make_plans, warn_of_small_nodes

# Kinds of plain values, and their names.
_KINDS = {
    int: "a whole number",
    float: "a number",
    str: "a word",
    bool: "true or false",
    type(None): "null",
}


def check(overrides: str) -> None:
    """Make everything that an experiment needs, and try what may be refused later.

    Raises
    ------
    SettingsError
        That says in one line which setting is wrong, and why.
    """
    check_values(overrides)
    forget_shares()
    cfg = compose_config(overrides)
    for group in cfg.keys() - {"schedule"}:  # what it leaves out is estimated
        _check_part(str(group), cfg[group])
    with explain_errors("privacy.plan"):
        instantiate(cfg.privacy.plan, num_examples=10**9)
    with explain_errors("data"):
        data = load_federation(overrides)
    with explain_errors("model"):
        build_untrained(overrides)
    with explain_errors():
        strategy = make_strategy(overrides)
        # All of a usual run; of a very long one its begin and its end.
        begins = range(0, cfg.steps, cfg.local_steps)
        for step in {*begins[:10_000], begins[-1]}:
            rates_at(
                strategy.settings.server_learning_rate, strategy.settings.momentum, step
            )
        strategy.settings.aggregation(
            np.zeros((cfg.num_nodes, 1)), cfg.num_malicious_nodes
        )
    if is_attacked(cfg):
        with explain_errors("attack"):
            _try_attack(make_attack(cfg), cfg.seed)
    with explain_errors():
        make_share(overrides, 0)
        for size in {*data.sizes}:
            make_plans(cfg, size)
        warn_of_small_nodes(cfg, data.sizes)
        if "_target_" in cfg.logger:
            instantiate(cfg.logger)
    _check_engine(cfg, min(data.sizes))


def check_study(overrides: str) -> None:
    """Refuse settings that the study of an experiment cannot have, or does not use."""
    for name in list_keys(overrides):
        if name.split(".")[0] not in ("experiment", "study", "seed", "hydra"):
            raise SettingsError(
                f"{name} is not used: the experiment is a study of its own, with its "
                f"settings under study; leave it out, or try study.{name}"
            )
    check_values(overrides)
    with explain_errors("study"):
        instantiate(compose_config(overrides).study)


def _check_part(name: str, part: object) -> None:
    """Refuse values that are not of the kind that the class of a part says."""
    if not isinstance(part, DictConfig) or "_target_" not in part:
        return
    with explain_errors(name):
        made = inspect.signature(get_method(str(part["_target_"])), eval_str=True)
    for key in sorted(map(str, part.keys() & made.parameters.keys())):
        wanted, value = made.parameters[key].annotation, part[key]
        kinds = {*get_args(wanted)} if isinstance(wanted, UnionType) else {wanted}
        _check_part(f"{name}.{key}", value)
        if not kinds <= _KINDS.keys():
            continue
        # A whole number is a number, too, and a truth is neither.
        if float in kinds and type(value) is int:
            continue
        if type(value) not in kinds:
            words = " or ".join(sorted(_KINDS[kind] for kind in kinds))
            raise SettingsError(f"{name}.{key}={value} must be {words}")


def _try_attack(attack: Attack, seed: int) -> None:
    """Let an attack send something once: what it cannot do is an error here."""
    if attack.replaces_vectors:
        rng = np.random.default_rng(seed)
        attack(rng.normal(size=(4, 3)), 1, rng, Average())


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
    if engine.name == "deployment" and not (CONF.parent / "pyproject.toml").exists():
        raise SettingsError(
            "engine=deployment builds a Flower app of the repository, which is not "
            "here; start it in a checkout, or use another engine"
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
    with explain_errors():
        cost = compute_spent(cfg, num_examples)
    if not cost <= engine.max_epsilon:
        raise SettingsError(
            f"steps={cfg.steps} spend epsilon={cost:.4g}, and every node stops at "
            f"engine.max_epsilon={engine.max_epsilon:g}; raise it, or lower steps"
        )
