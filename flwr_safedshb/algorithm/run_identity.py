"""Describe what determines a run's results, to refuse the checkpoint of another run."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord

from flwr_safedshb.algorithm.settings import StrategySettings
from flwr_safedshb.privacy.accounting.ranges import shorten_value

# Setting names to JSON values.
Identity = dict[str, object]

# The most differences that an error lists.
_MAX_DIFFERENCES = 4


def identify_run(
    settings: StrategySettings,
    strategy: str,
    initial: ArrayRecord,
    rates: Sequence[tuple[float, float]],
    **configs: ConfigRecord | None,
) -> Identity:
    """Return everything that determines what a run computes, as JSON values.

    Parameters
    ----------
    settings : StrategySettings
    strategy : str
        The name of the strategy's class.
    initial : ArrayRecord
        theta_0.
    rates : sequence of (float, float)
        Learning rate and momentum of each round.
    configs
        The user's own config entries that the nodes are sent, by kind of message.
    """
    return {
        # First, because the rates of all rounds follow from it.
        "local_steps": settings.local_steps,
        **{name: to_json(value) for name, value in settings.identity().items()},
        **{name: to_json(config or {}) for name, config in configs.items()},
        # The values of schedules, because a function has no comparable form.
        "server_learning_rate": _collapse([rate for rate, _ in rates]),
        "momentum": _collapse([momentum for _, momentum in rates]),
        "strategy": strategy,
        "num_rounds": len(rates),
        "model": {k: f"{a.dtype}{list(a.shape)}" for k, a in initial.items()},
        "initial_arrays": fingerprint_arrays(initial),
    }


def to_json(value: object) -> object:
    """Return a setting as a JSON value, equal for equal settings in any process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(entry) for entry in value]
    text = repr(value)
    if type(value).__repr__ is object.__repr__:
        parts = (f"{k}={to_json(v)}" for k, v in sorted(vars(value).items()))
        text = f"{type(value).__qualname__}({', '.join(parts)})"
    # Addresses differ from process to process.
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def truncate_rounds(identity: Identity, num_rounds: object) -> Identity | None:
    """Return the identity of the same run with fewer rounds, or None.

    It lets a finished run go on with more rounds. That needs output="last": the other
    outputs depend on the number of rounds.
    """
    all_rounds = identity["num_rounds"]
    if not isinstance(all_rounds, int) or not isinstance(num_rounds, int):
        return None
    if not 0 < num_rounds < all_rounds or identity["output"] != "last":
        return None
    rates = {
        name: _collapse(value[:num_rounds])
        for name in ("server_learning_rate", "momentum")
        if isinstance(value := identity[name], list)
    }
    return {**identity, **rates, "num_rounds": num_rounds}


def fingerprint_arrays(arrays: ArrayRecord) -> str:
    """Return a hash of the arrays' names, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype} {tuple(array.shape)} ".encode())
        digest.update(np.ascontiguousarray(array.numpy()).data)
    return digest.hexdigest()[:16]


def describe_differences(then: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Describe how two identities differ, in one line; empty if they are equal."""
    found = [
        f"{name} was {shorten_value(old)} and is {shorten_value(new)}"
        for name, old, new in _diff("", then, now)
    ]
    num_more = len(found) - _MAX_DIFFERENCES
    text = "; ".join(found[:_MAX_DIFFERENCES])
    return text + (f"; and {num_more} more" if num_more > 0 else "")


def _diff(name: str, then: object, now: object) -> Iterator[tuple[str, object, object]]:
    """Yield the path of each difference, and the two values at it."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*then, *now]):
            path = f"{name}.{key}" if name else key
            yield from _diff(path, then.get(key), now.get(key))
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for i, (old, new) in enumerate(zip(then, now, strict=True)):
            yield from _diff(f"{name}[{i}]", old, new)
    elif then != now:
        yield name, then, now


def _collapse(values: list[float]) -> object:
    """Return the one value of a list whose values are all equal, else the list."""
    return values[0] if len(set(values)) == 1 else values
