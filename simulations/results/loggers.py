"""What a run leaves for other tools: a CSV file, or TensorBoard's event files.

Both are made from the record of the whole run, so they are the same for every engine.
"""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from flwr_safedshb.files import replace_file
from simulations.results.record import RunRecord

Row = dict[str, float | None]


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
            "round/kappa": rounds["kappa"][j] if step else None,
            "round/lambda-max": rounds["lambda_max"][j] if step else None,
        }
        for reason, counts in rounds["excluded"].items():
            row[f"round/excluded-{reason}"] = counts[j] if step else None
        yield step, row


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


@dataclass(frozen=True)
class TensorBoard:
    """Scalars by step, and the configuration and the privacy of the run as text."""

    def __post_init__(self) -> None:
        if find_spec("tensorboard") is None:
            raise ImportError(
                "logger=tensorboard needs the package tensorboard; install "
                "flwr-safedshb[tensorboard], or use logger=csv"
            )

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
