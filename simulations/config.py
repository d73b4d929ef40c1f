"""The configuration of an experiment, composed by Hydra and held to what it may say.

Whatever is wrong with it is a `SettingsError`: one line that names the setting, its
value and the remedy, raised before anything has started.
"""

from __future__ import annotations

import difflib
import logging
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import entry_points
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException, InstantiationException, MissingConfigException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flwr_safedshb.privacy.accounting.ranges import MAX_STEPS
from simulations.overrides import CONF, list_items

# Where things are and how long to wait: what a run computes does not depend on them.
_HANDLING = ("checkpoint", "checkpoint_every", "log_level", "logger")
_ENGINE_HANDLING = ("client_cpus", "node_timeout", "run_timeout", "folder")
# Hydra's setting of further folders of configuration, and who publishes such.
SEARCH_PATH = "hydra.searchpath"
ENTRY_POINTS = "flwr_safedshb.conf"
# The least value of numbers that nothing else checks before a run.
_LEAST = {
    "num_nodes": 1,
    "num_malicious_nodes": 0,
    "steps": 1,
    "local_steps": 1,
    "weight_decay": 0,
    "seed": 0,
    "evaluate_every": 1,
    "checkpoint_every": 1,
    "engine.client_cpus": 1,
    "engine.node_timeout": 0,
    "engine.run_timeout": 0,
}


# Errors whose text says enough.
_KNOWN = (
    HydraException,
    OmegaConfBaseException,
    ValueError,
    TypeError,
    OSError,
    ImportError,
)


class SettingsError(ValueError):
    """Settings that make no run, in one line."""


@dataclass
class _Engine:
    name: str = MISSING
    seeded_noise: bool = MISSING
    client_cpus: int = 1
    max_epsilon: float | None = None
    authenticated_nodes: bool = False
    node_timeout: float = 600.0
    run_timeout: float = 3600.0
    folder: str | None = None


@dataclass
class _Privacy:
    plan: dict[str, Any] = MISSING
    delta: float = MISSING
    target_epsilon: float | None = None


@dataclass
class _Evaluation:
    every: int | None = None
    held_out: float = 0.0
    noise_multiplier: float | None = None
    max_loss: float = MISSING
    per_class: bool = False


@dataclass
class _Config:
    """Every setting there is, and its type."""

    num_nodes: int = MISSING
    num_malicious_nodes: int = MISSING
    steps: int = MISSING
    local_steps: int = MISSING
    server_learning_rate: float = MISSING
    momentum: float = MISSING
    weight_decay: float = MISSING
    norm_confidence: float | None = None
    output: str = MISSING
    seed: int = MISSING
    evaluate_every: int = MISSING
    private_evaluation: _Evaluation = MISSING
    checkpoint: str | None = None
    checkpoint_every: int = MISSING
    log_level: str = MISSING
    aggregation: dict[str, Any] = MISSING
    attack: dict[str, Any] = MISSING
    privacy: _Privacy = MISSING
    data: dict[str, Any] = MISSING
    split: dict[str, Any] = MISSING
    model: dict[str, Any] = MISSING
    schedule: dict[str, Any] = MISSING
    engine: _Engine = MISSING
    logger: dict[str, Any] = MISSING
    study: Any = None


@lru_cache(maxsize=8)
def compose_config(overrides: str) -> DictConfig:
    """Return the configuration that the overrides make of the packaged files."""
    with explain_errors(), initialize_config_dir(str(CONF), version_base=None):
        return compose("config", with_published(shlex.split(overrides)))


def with_published(overrides: Sequence[str]) -> list[str]:
    """Return overrides that also find the configuration of installed packages.

    A package publishes a folder of Hydra groups by an entry point of the group
    ``flwr_safedshb.conf`` whose value is the folder's module.
    """
    given = [o for o in overrides if o.startswith(SEARCH_PATH)]
    paths = [one for o in given for one in o.split("=", 1)[1].strip("[]").split(",")]
    paths += [f"pkg://{point.value}" for point in entry_points(group=ENTRY_POINTS)]
    others = [o for o in overrides if o not in given]
    return [f"{SEARCH_PATH}=[{','.join(paths)}]", *others] if paths else others


def format_override(name: str, value: object) -> str:
    """Return an override, quoted where Hydra would not read it as one word."""
    text = str(value)
    if not re.fullmatch(r"[\w./:%+-]+", text):
        text = "'" + text.replace("'", r"\'") + "'"
    return f"{name}={text}"


@cache
def resolve_config(overrides: str) -> Mapping[str, object]:
    """Return all that decides what a run computes, by name.

    Runs for which these are equal do the same with the same data, wherever their files
    are.
    """
    with explain_errors():
        config = OmegaConf.to_container(compose_config(overrides), resolve=True)
    values = cast(dict[str, dict[str, object]], config)
    for key in _HANDLING:
        values.pop(key, None)
    for key in _ENGINE_HANDLING:
        values["engine"].pop(key, None)
    # Not where the data are, but what they are: that is for their digest to say.
    values["data"].pop("path", None)
    return values


@lru_cache(maxsize=8)
def check_types(overrides: str) -> DictConfig:
    """Refuse names and types that are no setting's; return the configuration."""
    with explain_errors():
        typed = OmegaConf.merge(
            OmegaConf.structured(_Config), compose_config(overrides)
        )
        values = OmegaConf.to_container(typed, resolve=True, throw_on_missing=True)
    for name, value in list_items(values, ""):
        if isinstance(value, float) and not math.isfinite(value):
            raise SettingsError(f"{name}={value} must be finite")
    return cast(DictConfig, typed)


def read_checkpoint_path(overrides: str) -> str | None:
    """Return where a run is to leave its model, or None if it does not say."""
    path = cast(str | None, check_types(overrides).checkpoint)
    if path is not None and not path.endswith(".npz"):
        raise SettingsError(
            f"checkpoint={path} must end in .npz: results are put beside it, under the "
            "same name with other endings"
        )
    return path


def check_values(overrides: str) -> None:
    """Refuse names, types, numbers and combinations that make no run."""
    cfg = compose_config(overrides)
    typed = check_types(overrides)
    read_checkpoint_path(overrides)
    for name, least in _LEAST.items():
        value = OmegaConf.select(typed, name)
        if value < least:
            raise SettingsError(f"{name}={value} must be at least {least}")
    if cfg.steps > MAX_STEPS:
        raise SettingsError(f"steps={cfg.steps} must be at most {MAX_STEPS}")
    if cfg.seed >= 2**63:
        raise SettingsError(f"seed={cfg.seed} must be below 2^63")
    if str(cfg.log_level) not in (levels := logging.getLevelNamesMapping()):
        raise SettingsError(
            f"log_level={cfg.log_level} must be one of {', '.join(levels)}"
        )
    if not 0.0 < cfg.privacy.delta < 1.0:
        raise SettingsError(f"privacy.delta={cfg.privacy.delta} must lie in (0, 1)")
    target = cfg.privacy.get("target_epsilon")
    if target is not None and not 0.0 < target < math.inf:
        raise SettingsError(f"privacy.target_epsilon={target} must be above 0")
    _check_evaluation(cfg)
    n, f = cfg.num_nodes, cfg.num_malicious_nodes
    if 2 * f >= n:
        raise SettingsError(
            f"num_malicious_nodes={f} of num_nodes={n}: no rule withstands half of the "
            f"nodes; lower it to {(n - 1) // 2} or less, or add nodes"
        )
    if cfg.steps % cfg.local_steps:
        raise SettingsError(
            f"steps={cfg.steps} is no multiple of local_steps={cfg.local_steps}; "
            "every round has as many"
        )
    attacked = "_target_" in cfg.attack
    if attacked and f == 0:
        raise SettingsError(
            "num_malicious_nodes=0 with an attack: nobody would attack; use "
            "attack=none, or raise it"
        )
    kind = str(cfg.schedule.get("_target_", "")).rpartition(".")[2]
    for name in {"server_learning_rate", "momentum"} & set(list_keys(overrides)):
        if kind not in ("Constant", "LinearDecay"):
            raise SettingsError(
                f"{name}={cfg[name]} is of schedule=constant and linear, and the "
                "schedule that is chosen has its own; leave one of them out"
            )


def _check_evaluation(cfg: DictConfig) -> None:
    asked = cfg.private_evaluation
    if not 0.0 <= asked.held_out < 1.0:
        raise SettingsError(
            f"private_evaluation.held_out={asked.held_out} must lie in [0, 1)"
        )
    if asked.every is None:
        return
    free = asked.held_out > 0 and cfg.privacy.get("target_epsilon") is not None
    if asked.noise_multiplier is None and not free:
        raise SettingsError(
            "private_evaluation.noise_multiplier=null: give it, or both "
            "private_evaluation.held_out and privacy.target_epsilon, which decide it"
        )


def list_keys(overrides: str) -> list[str]:
    """Return the names of what is overridden."""
    return [re.split("[=@]", o.lstrip("+~"))[0] for o in shlex.split(overrides)]


@contextmanager
def explain_errors(group: str = "") -> Iterator[None]:
    """Turn whatever goes wrong inside into one line; `group` says where it belongs."""
    try:
        yield
    except SettingsError:
        raise
    except Exception as error:
        line = _line(error)
        named = not group or line.startswith(group) or f"{group}." in line
        raise SettingsError(line if named else f"{group}: {line}") from error


def check_numbers(
    settings: object, least: Mapping[str, float], whole: bool = True
) -> None:
    """Refuse attributes that are not finite numbers, or smaller than they may be."""
    kind = "a whole number" if whole else "a finite number"
    for name, bound in least.items():
        value = getattr(settings, name)
        fits = isinstance(value, int if whole else int | float)
        if not fits or isinstance(value, bool) or not bound <= value < math.inf:
            raise ValueError(f"{name}={value} must be {kind}, at least {bound:g}")


def _line(error: Exception) -> str:
    text = str(error)
    if isinstance(error, MissingConfigException) and error.options is not None:
        name = str(error.missing_cfg_file).replace("/", "=")
        return f"{name}: there is no such option; choose {', '.join(error.options)}"
    place = re.search("full_key: (.*)", text)
    if found := re.match(r"Could not override '(.*)'\.\n|Key '(.*)' not in", text):
        name = place[1] if place else found[1]
        return f"{name}: there is no such setting{_similar(name)}"
    where = f"{place[1]}: " if place else ""
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = cast(Exception, error.__cause__)
        text = str(error)
    known = isinstance(error, _KNOWN)
    kind = "" if known and text else f"{type(error).__name__} "
    words = re.split(r"\n\s*(?:full_key|See http|object_type)", text)[0]
    return f"{where}{kind}{' '.join(words.split())}".strip()


def _similar(name: str) -> str:
    with initialize_config_dir(str(CONF), version_base=None):
        known = dict(list_items(OmegaConf.to_container(compose("config")), ""))
    close = difflib.get_close_matches(name, [*known, "experiment", "study"], 1, 0.8)
    if close:
        return f"; did you mean {close[0]}?"
    return "; those of a part's class can be added, with + before them"
