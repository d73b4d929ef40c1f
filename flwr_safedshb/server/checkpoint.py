"""How far a server has come, on disk: complete or not at all.

One .npz file without pickles: the model, the iterate kept for ``output="uniform"``, and
as JSON everything else, among it the settings that made the run: a run with other
settings is not the rest of this one. The file is written beside its name, flushed to
the disk and then renamed, so a kill leaves either the old file or the new one.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord

from flwr_safedshb.files import replace_file

_FORMAT = 2
# Differences that are told, and characters of a value; enough to see what is wrong.
_TOLD, _LONG = 4, 60

History = dict[int, MetricRecord]
# Names to values that JSON has.
Settings = dict[str, object]


@dataclass
class Progress:
    """A run of the server after `step` steps.

    Attributes
    ----------
    session : str
        Names the run to the clients, who keep their momentum under it.
    seed : int
        From which the server's random choices follow.
    num_rounds : int
        T.
    step : int
        Steps done (t).
    arrays : ArrayRecord
        theta_t.
    kept : ArrayRecord or None
        The iterate to return, once it has come, for ``output="uniform"``.
    train, evaluate_clientapp, evaluate_serverapp : dict of round to MetricRecord
        Metrics of the rounds so far.
    settings : dict of str to JSON values
        What made the run.
    """

    session: str
    seed: int
    num_rounds: int
    step: int
    arrays: ArrayRecord
    kept: ArrayRecord | None = None
    train: History = field(default_factory=dict)
    evaluate_clientapp: History = field(default_factory=dict)
    evaluate_serverapp: History = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)


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


def compact(values: list[float]) -> object:
    """Return one value for a list of equal ones."""
    return values[0] if len(set(values)) == 1 else values


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


_HISTORIES = ("train", "evaluate_clientapp", "evaluate_serverapp")


def save(path: Path, progress: Progress) -> None:
    """Replace the file at `path`; on disk when this returns."""
    content = {
        "format": _FORMAT,
        "session": progress.session,
        "seed": progress.seed,
        "num_rounds": progress.num_rounds,
        "step": progress.step,
        "names": list(progress.arrays),
        "kept": progress.kept is not None,
        "histories": {
            name: {
                number: dict(record)
                for number, record in getattr(progress, name).items()
            }
            for name in _HISTORIES
        },
        "settings": progress.settings,
    }
    arrays = {f"model-{i}": a.numpy() for i, a in enumerate(progress.arrays.values())}
    if progress.kept is not None:
        kept = progress.kept.values()
        arrays |= {f"kept-{i}": array.numpy() for i, array in enumerate(kept)}
    text = np.frombuffer(json.dumps(content).encode(), np.uint8)
    replace_file(
        path,
        lambda file: np.savez(file, allow_pickle=False, content=text, **arrays),
    )


def load(path: Path) -> Progress | None:
    """Return what `save` wrote, None if there is no file.

    Raises
    ------
    ValueError
        If the file is something else.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            content = json.loads(file["content"].tobytes())
            if content["format"] != _FORMAT:
                raise ValueError(f"format {content['format']}")

            def arrays(kind: str) -> ArrayRecord:
                names: list[str] = content["names"]
                return ArrayRecord(
                    {name: Array(file[f"{kind}-{i}"]) for i, name in enumerate(names)}
                )

            histories = {
                name: {
                    int(number): MetricRecord(record)
                    for number, record in content["histories"][name].items()
                }
                for name in _HISTORIES
            }
            return Progress(
                session=str(content["session"]),
                seed=int(content["seed"]),
                num_rounds=int(content["num_rounds"]),
                step=int(content["step"]),
                arrays=arrays("model"),
                kept=arrays("kept") if content["kept"] else None,
                settings=dict(content["settings"]),
                **histories,
            )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"checkpoint={str(path)!r} is no checkpoint of this version ({error}); "
            "give another path, or remove it to start anew"
        ) from error


def past_of(path: Path, settings: Settings) -> Progress | None:
    """Return the checkpoint of a run that is to go on, None if there is none.

    Parameters
    ----------
    path : Path
    settings : dict
        What makes the run: ``seed`` None stands for any, and ``initial_arrays`` may be
        the fingerprint of the model that an unfinished run has come to.

    Raises
    ------
    ValueError
        If the checkpoint was made with other settings; says which.
    """
    found = load(path)
    if found is None:
        return None
    now, then = dict(settings), found.settings
    if now["seed"] is None:
        now["seed"] = then["seed"]
    unfinished = found.step < found.num_rounds
    if unfinished and now["initial_arrays"] == fingerprint(found.arrays):
        now["initial_arrays"] = then["initial_arrays"]
    if problem := differences(then, now):
        raise ValueError(
            f"checkpoint={str(path)!r} is of another run: {problem}; give the settings "
            "that it was made with, or another path to start anew"
        )
    return found
