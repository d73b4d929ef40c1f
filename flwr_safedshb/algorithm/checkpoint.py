"""Save and load a server's checkpoint: one file, replaced atomically.

It is an .npz file without pickles. It holds the model, the second model that some
``output`` settings need, and everything else as JSON, with the settings that identify
the run. It is written under another name, flushed to the disk and renamed, so a kill
leaves either the old file or the new one.
"""

from __future__ import annotations

import json
from logging import INFO
from pathlib import Path
from typing import cast

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.common import log

from flwr_safedshb.algorithm.npz import Arrays, read_archive, write_archive
from flwr_safedshb.algorithm.progress import History, Progress
from flwr_safedshb.algorithm.run_identity import (
    Identity,
    describe_differences,
    fingerprint_arrays,
    truncate_rounds,
)
from flwr_safedshb.atomic_io import replace_file
from flwr_safedshb.sanitize import SAFE_NAME, escape

_FORMAT = 3
# The most bytes of the JSON text, and of a model whose size is not known.
_MAX_TEXT, _MAX_MODEL = 2**27, 2**34
# Bounds on integers, such as node ids, and on the nesting of the settings.
_MAX_INTEGER, _MAX_DEPTH = 2**64, 32

_HISTORIES = ("train", "evaluate_clientapp", "evaluate_serverapp")


def save(path: Path, progress: Progress) -> None:
    """Replace the file at `path`; it is on the disk when this returns."""
    content = {
        "format": _FORMAT,
        "session": progress.session,
        "seed": progress.seed,
        # Without `start` the number of rounds is unknown.
        "num_rounds": max(progress.num_rounds, progress.step),
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
    arrays = {f"model/{name}": a.numpy() for name, a in progress.arrays.items()}
    if progress.kept is not None:
        arrays |= {f"kept/{name}": a.numpy() for name, a in progress.kept.items()}
    text = np.frombuffer(json.dumps(content).encode(), np.uint8)
    replace_file(path, lambda file: write_archive(file, {"content": text} | arrays))


def load(path: Path, model_bytes: int = _MAX_MODEL) -> Progress | None:
    """Load what `save` wrote; return None if there is no file.

    The file is not trusted: every value is checked, and reading takes no more memory
    than two models.

    Parameters
    ----------
    path : Path
    model_bytes : int
        The most bytes of the model.

    Raises
    ------
    ValueError
        If the file is not a checkpoint.
    """
    try:
        arrays = read_archive(path, 2 * model_bytes + _MAX_TEXT)
        return _parse_progress(arrays)
    except FileNotFoundError:
        return None
    except (
        ArithmeticError,
        AttributeError,
        IsADirectoryError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        reason = escape(str(error))[:200]
        raise ValueError(
            f"checkpoint={str(path)!r} is not a checkpoint of this version ({reason}); "
            "give another path, or remove it to start a new run"
        ) from error


def load_checkpoint(path: str | Path) -> Progress:
    """Return a run of a server from its checkpoint: its model, metrics and settings.

    Raises
    ------
    FileNotFoundError, ValueError
        If there is no file, or it is not a checkpoint.
    """
    found = load(Path(path))
    if found is None:
        raise FileNotFoundError(f"there is no checkpoint {str(path)!r}")
    return found


def _parse_progress(arrays: Arrays) -> Progress:
    """Return the progress in the arrays of a file, with every value checked."""
    text = arrays.pop("content").tobytes()
    if len(text) > _MAX_TEXT:
        raise ValueError(f"its text has {len(text)} bytes")
    content = json.loads(text)
    if content["format"] != _FORMAT:
        raise ValueError(f"format {content['format']}")
    names, kept = content["names"], content["kept"]
    unique = isinstance(names, list) and all(isinstance(n, str) for n in names)
    if not unique or len({*names}) != len(names) or not isinstance(kept, bool):
        raise ValueError("it does not name its arrays")
    "".join(names).encode()  # raises for lone surrogates, which cannot be sent
    kinds = ["model", "kept"] if kept else ["model"]
    if {*arrays} != {f"{kind}/{name}" for kind in kinds for name in names}:
        raise ValueError("its arrays are not those that it names")

    def record(kind: str) -> ArrayRecord:
        return ArrayRecord({name: Array(arrays[f"{kind}/{name}"]) for name in names})

    model, output = record("model"), record("kept") if kept else None
    if output is not None and not _has_same_arrays(output, model):
        raise ValueError("its second model has other shapes or dtypes")
    session, settings = content["session"], content["settings"]
    if not isinstance(session, str) or not SAFE_NAME.fullmatch(session):
        raise ValueError("its session is not a safe name")
    if not isinstance(settings, dict) or not _is_shallow(settings):
        raise ValueError("its settings are not a dict, or are nested too deeply")
    num_rounds = _parse_whole(content, "num_rounds", _MAX_INTEGER)
    return Progress(
        session=session,
        # A user's seed may have any size.
        seed=_parse_whole(content, "seed", None),
        num_rounds=num_rounds,
        step=_parse_whole(content, "step", num_rounds + 1),
        arrays=model,
        kept=output,
        settings=settings,
        **{name: _parse_history(content["histories"][name]) for name in _HISTORIES},
    )


def _parse_whole(content: Identity, name: str, end: int | None) -> int:
    value = content[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"its {name} is {value!r:.60}")
    if end is not None and value >= end:
        raise ValueError(f"its {name} is {value:.6g}, not below {end}")
    return value


def _parse_history(rounds: dict[str, dict[str, object]]) -> History:
    found = {}
    for number, metrics in rounds.items():
        if not number.isascii() or str(int(number)) != number or int(number) < 0:
            raise ValueError(f"{number!r:.60} is not a round number")
        for value in metrics.values():
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, int) and abs(each) >= _MAX_INTEGER:
                    raise ValueError("a metric is out of range")
        # MetricRecord checks the types of all values.
        found[int(number)] = MetricRecord(metrics)  # type: ignore[arg-type]
    return found


def _has_same_arrays(kept: ArrayRecord, model: ArrayRecord) -> bool:
    """Return whether arrays have the model's shapes, and its types or float64."""
    pairs = zip(kept.values(), model.values(), strict=True)
    return all(
        tuple(one.shape) == tuple(other.shape) and one.dtype in (other.dtype, "float64")
        for one, other in pairs
    )


def _is_shallow(settings: object) -> bool:
    """Return whether values are nested at most `_MAX_DEPTH` deep."""
    level = [settings]
    for _ in range(_MAX_DEPTH):
        nested = [value for value in level if isinstance(value, dict | list)]
        level = [
            entry
            for value in nested
            for entry in (value.values() if isinstance(value, dict) else value)
        ]
    return not level


def load_matching(
    path: Path, identity: Identity, model_bytes: int = _MAX_MODEL
) -> Progress | None:
    """Load the checkpoint of the run with this identity; None if there is no file.

    Parameters
    ----------
    path : Path
    identity : dict
        The run's (`identify_run`). ``seed`` None matches any seed. The initial arrays
        may also be the current model of an unfinished run.
    model_bytes : int
        The most bytes of the model.

    Raises
    ------
    ValueError
        If the checkpoint is of another run; it lists the differences.
    """
    found = load(path, model_bytes)
    if found is None:
        return None
    now, then = dict(identity), found.settings
    if now["seed"] is None:
        now["seed"] = then.get("seed")
    longer = truncate_rounds(now, then.get("num_rounds"))
    unfinished = found.step < found.num_rounds or longer is not None
    if unfinished and now["initial_arrays"] == fingerprint_arrays(found.arrays):
        now["initial_arrays"] = then.get("initial_arrays")
    if longer is not None:
        longer["initial_arrays"] = now["initial_arrays"]
    if problem := describe_differences(then, now if longer is None else longer):
        raise ValueError(
            f"checkpoint={str(path)!r} is of another run: {problem}; restore these "
            "settings, or give another path to start a new run"
        )
    if longer is not None:
        found.num_rounds, found.settings = cast(int, now["num_rounds"]), now
    log(INFO, "Resuming from %s after round %d", path, found.step)
    return found
