"""What a run leaves for other tools: a CSV file, TensorBoard, Weights & Biases, MLflow.

All are made from the record of the whole run, so they are the same for every engine.
"""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from flwr_safedshb.atomic_io import replace_file
from simulations.config import SettingsError
from simulations.results.schema import RunRecord

Row = dict[str, float | None]
# Characters of what a service says.
_LONG = 200


def rows(run: RunRecord) -> Iterator[tuple[int, Row]]:
    """Yield each step with what is known of it, always under the same names.

    ``evaluation/...`` is of the model after so many steps, None where it was not
    evaluated; ``round/...`` is of the step that led there, None for step 0 and where
    the rule does not tell.
    """
    evaluations, rounds = run["evaluations"], run["rounds"]
    evaluated = {step: i for i, step in enumerate(evaluations["step"])}
    left_out = [None if nodes is None else len(nodes) for nodes in rounds["left_out"]]
    for step in range(len(rounds["replies"]) + 1):
        i, j = evaluated.get(step), step - 1
        row: Row = {
            "evaluation/accuracy": None if i is None else evaluations["accuracy"][i],
            "evaluation/test-loss": None if i is None else evaluations["test_loss"][i],
            "evaluation/training-loss": None
            if i is None
            else evaluations["training_loss"][i],
            "round/replies": rounds["replies"][j] if step else None,
            "round/skipped": rounds["skipped"][j] if step else None,
            "round/left-out": left_out[j] if step else None,
        }
        for name, values in rounds["metrics"].items():
            row[f"round/{name}"] = values[j] if step else None
        for reason, counts in rounds["excluded"].items():
            row[f"round/excluded-{reason}"] = counts[j] if step else None
        yield step, row


def log_run(
    logger: Callable[[RunRecord, Path], object], run: RunRecord, model: Path
) -> object:
    """Log a run that has ended, and return where; a service may be away or set wrong.

    Raises
    ------
    SettingsError
        With what the service says. The run is not lost.
    """
    try:
        return logger(run, model)
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0][:_LONG]
        raise SettingsError(
            f"{type(logger).__name__} did not take the log: {said}; the run is kept, "
            "and the same command tries again"
        ) from error


@dataclass(frozen=True)
class CSV:
    """A row for each step; what is not known is empty."""

    def __call__(self, run: RunRecord, model: Path) -> Path:
        """Write beside the model, whole or not at all, and return where."""
        table = list(rows(run))
        text = io.StringIO()
        writer = csv.DictWriter(text, ["step", *table[0][1]], lineterminator="\n")
        writer.writeheader()
        writer.writerows({"step": step, **row} for step, row in table)
        path = model.with_suffix(".csv")
        replace_file(path, lambda file: file.write(text.getvalue().encode()))
        return path


def _need(package: str, install: str) -> None:
    """Say before a run, and not after it, that its logger's package is missing."""
    if find_spec(package) is None:
        raise ImportError(
            f"logger={package} needs the package {package}; install {install}, or use "
            "logger=csv"
        )


@dataclass(frozen=True)
class TensorBoard:
    """Scalars by step, and the configuration and the privacy of the run as text."""

    def __post_init__(self) -> None:
        _need("tensorboard", "flwr-safedshb[tensorboard]")

    def __call__(self, run: RunRecord, model: Path) -> Path:
        """Write beside the model, in the place of an earlier log; return where."""
        from torch.utils.tensorboard import SummaryWriter

        folder = model.with_suffix(".tensorboard")
        shutil.rmtree(folder, ignore_errors=True)
        with SummaryWriter(str(folder)) as writer:
            for step, row in rows(run):
                for name, value in row.items():
                    if value is not None:
                        writer.add_scalar(name, value, step)
            said = run["privacy"]
            writer.add_text("privacy", f"{said['statement']}\n\n{said['note']}")
            writer.add_text("overrides", " ".join(run["overrides"]) or "none")
        return folder


@dataclass(frozen=True)
class WandB:
    """A run of Weights & Biases; where it goes is said by its own settings.

    Attributes
    ----------
    project : str
    """

    project: str = "safedshb"

    def __post_init__(self) -> None:
        _need("wandb", "wandb")

    def __call__(self, run: RunRecord, model: Path) -> str:
        """Send the whole run; return its name."""
        wandb = import_module("wandb")
        with wandb.init(project=self.project, config=_about(run)) as log:
            for step, row in rows(run):
                log.log(_known(row), step=step)
            return f"{self.project}/{log.id}"


@dataclass(frozen=True)
class MLflow:
    """A run of MLflow; where it goes is said by ``MLFLOW_TRACKING_URI``.

    Attributes
    ----------
    experiment : str
    """

    experiment: str = "safedshb"

    def __post_init__(self) -> None:
        _need("mlflow", "mlflow")

    def __call__(self, run: RunRecord, model: Path) -> str:
        """Send the whole run; return its name."""
        mlflow = import_module("mlflow")
        mlflow.set_experiment(self.experiment)
        with mlflow.start_run() as log:
            mlflow.log_params(_about(run))
            for step, row in rows(run):
                mlflow.log_metrics(_known(row), step=step)
            return f"{self.experiment}/{log.info.run_id}"


def _known(row: Row) -> dict[str, float]:
    return {name: value for name, value in row.items() if value is not None}


def _about(run: RunRecord) -> dict[str, str]:
    said = run["privacy"]
    return {
        "overrides": " ".join(run["overrides"]) or "none",
        "privacy": f"{said['statement']} {said['note']}",
    }
