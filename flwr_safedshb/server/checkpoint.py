"""How far a server has come, on disk: complete or not at all.

One .npz file without pickles: the model, the iterate kept for ``output="uniform"``, and
as JSON everything else. It is written beside its name, flushed to the disk and then
renamed, so a kill leaves either the old file or the new one.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord

from flwr_safedshb.files import replace_file
from flwr_safedshb.server.screening import Template

_FORMAT = 1

History = dict[int, MetricRecord]


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

    def misfit(
        self,
        initial: ArrayRecord,
        num_rounds: int,
        rates: Callable[[int], tuple[float, float]],
    ) -> str | None:
        """Say why this is not the past of the run that is asked for, if it is not.

        Parameters
        ----------
        initial : ArrayRecord
            A model with the names and shapes of the run's.
        num_rounds : int
            T.
        rates : callable of the step
            Its learning rate and momentum.
        """
        if Template.of(self.arrays) != Template.of(initial):
            return "holds another model than initial_arrays; give that one"
        if self.num_rounds != num_rounds:
            return (
                f"is of a run of {self.num_rounds} rounds, and num_rounds={num_rounds};"
                " ask for as many"
            )
        for number, metrics in self.train.items():
            then = metrics["learning-rate"], metrics["momentum"]
            now = rates(number - 1)
            if then != now:
                return (
                    f"has learning rate and momentum {then} in round {number}, and the "
                    f"schedules say {now}; resume with the same schedules"
                )
        return None


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
                **histories,
            )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"checkpoint={str(path)!r} is no checkpoint of this version ({error}); "
            "give another path, or remove it to start anew"
        ) from error
