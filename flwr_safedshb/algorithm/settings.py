"""The settings of a strategy: in the log, and as what makes a run.

A checkpoint holds the settings that made its run, because a run with other settings is
not the rest of it.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from logging import INFO, WARNING
from typing import TYPE_CHECKING, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.common import log

from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.aggregation.rule import Rule
from flwr_safedshb.algorithm.wire import (
    MAX_LOCAL_STEPS,
    RUN_EVALUATIONS,
    RUN_STEPS,
    decode_arrays,
)

if TYPE_CHECKING:
    from flwr_safedshb.algorithm.progress import Progress
    from flwr_safedshb.algorithm.resumable import ResumableStrategy
    from flwr_safedshb.strategy import SafeDSHB

# Names to values that JSON has.
Settings = dict[str, object]

# Arguments that say when rounds run and what is where, and not what a run computes: a
# run may be resumed with others.
_HANDLING = {
    "self",
    "min_available_nodes",
    "node_timeout",
    "give_up_after",
    "stop_when",
    "authenticated_nodes",
    "checkpoint",
    "checkpoint_every",
    "arrayrecord_key",
    "configrecord_key",
}
# Differences that are told, and characters of a value; enough to see what is wrong.
_TOLD, _LONG = 4, 60


# What clients of other strategies are told, and ours do not read: a step is a batch of
# the client's plan, and the rate is the server's.
_IDLE = {
    "batch-size",
    "epochs",
    "learning-rate",
    "local-epochs",
    "lr",
    "num-epochs",
    "optimizer",
    "proximal-mu",
    "weight-decay",
}


def rule_of(aggregation: object) -> Rule:
    """Return the rule of a strategy, SMEA unless the user says another."""
    if aggregation is None:
        return SMEA()
    if not isinstance(aggregation, Rule):
        raise ValueError(
            f"aggregation={_short(aggregation)} must be a rule of flwr_safedshb, such "
            "as SMEA() or Filter()"
        )
    return aggregation


def check_initial(initial: object) -> None:
    """Refuse what no run can start from, before a node has spent any budget on it."""
    if not isinstance(initial, ArrayRecord) or not initial:
        kind = "empty" if isinstance(initial, ArrayRecord) else type(initial).__name__
        problem = f"are {kind}, and no ArrayRecord with the arrays of a model"
    else:
        for name, array in zip(initial, decode_arrays(initial), strict=True):
            if array.dtype.kind != "f":
                problem = f"have {name!r} of {array.dtype}, which cannot be trained"
                break
            if not np.isfinite(array).all():
                problem = f"have {name!r} with values that are not finite"
                break
        else:
            return
    raise ValueError(
        f"the initial arrays {problem}; start the run from trained_arrays(model)"
    )


def check_local_steps(local_steps: object) -> None:
    """Refuse a number of local steps that no node would take."""
    whole = isinstance(local_steps, int) and not isinstance(local_steps, bool)
    if not whole or not 1 <= cast(int, local_steps) <= MAX_LOCAL_STEPS:
        raise ValueError(
            f"local_steps={_short(local_steps)} must be an integer from 1 to "
            f"{MAX_LOCAL_STEPS}"
        )


def check_numbers(
    num_malicious_nodes: object,
    checkpoint_every: int,
    fraction_evaluate: float,
    noise_std: float | None,
) -> None:
    """Refuse numbers of a strategy that make no sense."""
    whole = isinstance(num_malicious_nodes, int | np.integer)
    if not whole or isinstance(num_malicious_nodes, bool):
        given = _short(num_malicious_nodes)
        raise ValueError(f"num_malicious_nodes={given} must be an integer")
    if checkpoint_every < 1:
        raise ValueError(f"checkpoint_every={checkpoint_every} must be at least 1")
    if not 0.0 <= fraction_evaluate <= 1.0:
        raise ValueError(f"fraction_evaluate={fraction_evaluate} must be in [0, 1]")
    if noise_std is not None and not 0.0 <= noise_std < np.inf:
        raise ValueError(f"noise_std={noise_std} must be finite and at least 0")


def warn_of_idle_settings(config: Mapping[str, object]) -> None:
    """Name entries of `train_config` that do nothing here."""
    idle = [key for key in config if key.lower().replace("_", "-") in _IDLE]
    if idle:
        log(
            WARNING,
            "train_config has %s, which no client of Safe-DSHB reads: a step is one "
            "batch of the client's plan, and its rate is server_learning_rate",
            ", ".join(idle),
        )


def warn_of_plain_evaluation(fraction: float) -> None:
    """Say that evaluations without noise are outside of any privacy guarantee."""
    if fraction > 0.0:
        log(
            WARNING,
            "fraction_evaluate=%g: nodes report what they measure on private data "
            "without noise, outside of their privacy guarantee, and nodes that keep a "
            "budget refuse it; evaluate_every asks for private evaluations instead",
            fraction,
        )


def run_length(strategy: ResumableStrategy, progress: Progress) -> dict[str, int]:
    """Return how many steps and evaluations each node takes at most, if it is known.

    It is not known of a run that `start` did not begin, and a node that takes part in
    some rounds only would be committed to far more steps than it takes.
    """
    rounds = progress.num_rounds
    if strategy.num_rounds is None or strategy.participation.fraction < 1.0:
        return {}
    asked, evaluations = strategy.evaluations, 0
    if asked is not None:
        evaluations = rounds // asked.every + (rounds % asked.every > 0)
    steps = rounds * strategy.local_steps
    return {RUN_STEPS: steps, RUN_EVALUATIONS: evaluations}


def log_settings(strategy: SafeDSHB) -> None:
    """Log the settings, as every strategy of Flower does."""
    part = strategy.participation
    log(INFO, "\t├──> Safe-DSHB settings:")
    log(INFO, "\t│\t├── Aggregation: %s", strategy.aggregation)
    log(INFO, "\t│\t├── Number of malicious nodes: %d", strategy.num_malicious_nodes)
    log(INFO, "\t│\t├── Server learning rate: %s", strategy.server_learning_rate)
    log(INFO, "\t│\t├── Momentum: %s", strategy.momentum)
    log(INFO, "\t│\t├── Local steps: %d", strategy.local_steps)
    log(INFO, "\t│\t├── Output: %s", strategy.output)
    log(INFO, "\t│\t└── Checkpoint: %s", strategy.checkpoint or "none")
    log(INFO, "\t├──> Sampling:")
    log(
        INFO,
        "\t│\t├── Fraction: train (%.2f) | evaluate (%.2f)",
        part.fraction,
        strategy.fraction_evaluate,
    )
    log(
        INFO,
        "\t│\t└── Minimum nodes: train (%d) | available (%d), within %g s",
        part.min_train_nodes,
        part.min_available_nodes,
        part.node_timeout,
    )
    log(INFO, "\t└──> Keys in records:")
    log(INFO, "\t\t├── ArrayRecord key: '%s'", strategy.arrayrecord_key)
    log(INFO, "\t\t└── ConfigRecord key: '%s'", strategy.configrecord_key)


def settings_of(
    strategy: ResumableStrategy,
    initial: ArrayRecord,
    rates: Sequence[tuple[float, float]],
    **configs: ConfigRecord | None,
) -> Settings:
    """Return all that decides what a run computes, as JSON values.

    Parameters
    ----------
    strategy : SafeDSHB
    initial : ArrayRecord
        theta_0.
    rates : sequence of (float, float)
        Learning rate and momentum of each step.
    configs
        What the nodes are told.
    """
    # Here, because that module needs this one.
    from flwr_safedshb.strategy import SafeDSHB

    arguments = inspect.signature(SafeDSHB.__init__).parameters
    named = [name for name in arguments if name not in _HANDLING]
    return {
        # First, for the rates of all rounds follow from it.
        "local_steps": strategy.local_steps,
        **{name: described(getattr(strategy, name)) for name in named},
        **{name: described(config or {}) for name, config in configs.items()},
        # Their values: a function's name does not say what it returns.
        "server_learning_rate": _compact([rate for rate, _ in rates]),
        "momentum": _compact([momentum for _, momentum in rates]),
        "strategy": type(strategy).__name__,
        "num_rounds": len(rates),
        "model": {k: f"{a.dtype}{list(a.shape)}" for k, a in initial.items()},
        "initial_arrays": fingerprint(initial),
    }


def described(value: object) -> object:
    """Return a setting as a JSON value, equal for equal settings in any process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): described(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [described(entry) for entry in value]
    text = repr(value)
    if type(value).__repr__ is object.__repr__:
        parts = (f"{k}={described(v)}" for k, v in sorted(vars(value).items()))
        text = f"{type(value).__qualname__}({', '.join(parts)})"
    # Where an object lies in memory says nothing about it.
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _compact(values: list[float]) -> object:
    """Return one value for a list of equal ones."""
    return values[0] if len(set(values)) == 1 else values


def shortened(settings: Settings, num_rounds: object) -> Settings | None:
    """Return what a run was before it got more rounds; None if it has not.

    Only a run that returns its last model can go on after its end.
    """
    more = settings["num_rounds"]
    if not isinstance(more, int) or not isinstance(num_rounds, int):
        return None
    if not 0 < num_rounds < more or settings["output"] != "last":
        return None
    rates = {
        name: _compact(value[:num_rounds])
        for name in ("server_learning_rate", "momentum")
        if isinstance(value := settings[name], list)
    }
    return {**settings, **rates, "num_rounds": num_rounds}


def fingerprint(arrays: ArrayRecord) -> str:
    """Return a digest of names, shapes, types and values."""
    digest = hashlib.sha256()
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype} {tuple(array.shape)} ".encode())
        digest.update(np.ascontiguousarray(array.numpy()).data)
    return digest.hexdigest()[:16]


def differences(then: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Say what differs between two sets of settings; empty if nothing does."""
    found = [
        f"{name} was {_short(old)} and is {_short(new)}"
        for name, old, new in _differing("", then, now)
    ]
    more = len(found) - _TOLD
    return "; ".join(found[:_TOLD]) + (f"; and {more} more" if more > 0 else "")


def _differing(
    name: str, then: object, now: object
) -> Iterator[tuple[str, object, object]]:
    """Yield where two values differ, and what they are there."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*then, *now]):
            place = f"{name}.{key}" if name else key
            yield from _differing(place, then.get(key), now.get(key))
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for i, (old, new) in enumerate(zip(then, now, strict=True)):
            yield from _differing(f"{name}[{i}]", old, new)
    elif then != now:
        yield name, then, now


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."
