"""How far a server has come, on disk: complete or not at all.

One .npz file without pickles: the model, the iterate kept for ``output="uniform"``, and
as JSON everything else, among it the settings that made the run: a run with other
settings is not the rest of this one. The file is written beside its name, flushed to
the disk and then renamed, so a kill leaves either the old file or the new one.
"""

from __future__ import annotations

import json
import secrets
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from logging import INFO
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.common import log

from flwr_safedshb.files import replace_file
from flwr_safedshb.server.settings import Settings, differences, fingerprint

_FORMAT = 2

History = dict[int, MetricRecord]
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


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

    @classmethod
    def fresh(
        cls, seed: int, num_rounds: int, arrays: ArrayRecord, settings: Settings
    ) -> Progress:
        """Return the progress of a run that has not begun."""
        session = secrets.token_hex(8)
        return cls(session, seed, num_rounds, 0, arrays, settings=settings)

    def evaluating(self, evaluate_fn: EvaluateFn, offset: int) -> EvaluateFn:
        """Return the function with round numbers that go on, and results that stay."""

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            number = server_round + offset
            if number not in self.evaluate_serverapp:
                metrics = evaluate_fn(number, arrays)
                if metrics is None:
                    return None
                self.evaluate_serverapp[number] = metrics
            return self.evaluate_serverapp[number]

        return evaluate


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
    log(INFO, "Resuming from %s after round %d", path, found.step)
    return found
