"""The server's record of a round, for others to check: receipts, and what was done.

Beside the checkpoint ``model.npz`` there is a folder ``model.receipts`` with two files
a round: JSON with the receipts, the weights that the rule gave and its constant; and an
.npz file with the model that was sent and the momentums that came back, or, for large
models, with the Gram matrix of the momentums alone.

With the momentums everything can be computed again, for n + 1 times the bytes of the
model a round. A Gram matrix has n^2 numbers, whatever the size of the model, and shows
that the rule's answer follows from it; that it is the matrix of the momentums that were
signed is the server's word. Momentums are post-processing of private gradients, so
neither costs privacy.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal

from flwr_safedshb.algorithm.npz import Arrays, read_archive, write_archive
from flwr_safedshb.algorithm.receipts import SignedReceipt
from flwr_safedshb.atomic_io import replace_file
from flwr_safedshb.sanitize import escape

FORMAT = "safedshb round 1"
# What is kept of the momentums.
Receipts = Literal["gram", "momentums"]
# The most bytes of a record's text: of 10,000 receipts with one plan.
_MAX_TEXT = 2**25
# The most bytes of the arrays of a round.
_MAX_ARRAYS = 2**34


class RecordError(ValueError):
    """The record of a round is missing or cannot be read."""


@dataclass(frozen=True)
class RoundRecord:
    """A round, as the server recorded it.

    Attributes
    ----------
    number : int
        From 1 on.
    session : str
    model : str
        `receipts.hash_arrays` of theta_t.
    num_malicious_nodes : int
        f of this round: without those whose replies prove them adversaries.
    learning_rate : float
    skipped : bool
    weights : list of float or None
        What the rule gave to each reply; None if the round was skipped, or the rule
        works coordinate by coordinate.
    kappa : float or None
    replies : list of (node, SignedReceipt)
        In the order in which they were aggregated.
    arrays : dict of arrays
        "gram"; or "model/<name>" and "<i>/<name>" of the i-th reply.
    """

    number: int
    session: str
    model: str
    num_malicious_nodes: int
    learning_rate: float
    skipped: bool
    weights: list[float] | None
    kappa: float | None
    replies: Sequence[tuple[int, SignedReceipt]]
    arrays: Arrays = field(repr=False)

    def write(self, folder: Path) -> None:
        """Write both files; they are on the disk when this returns."""
        content = {
            k: v for k, v in vars(self).items() if k not in ("replies", "arrays")
        }
        content["format"] = FORMAT
        content["replies"] = [
            {"node": node, **receipt.to_dict()} for node, receipt in self.replies
        ]
        text = json.dumps(content, allow_nan=False).encode()
        archive, record = name_files(folder, self.number)
        replace_file(archive, lambda file: write_archive(file, self.arrays))
        replace_file(record, partial(_write, text))

    @classmethod
    def read(cls, folder: Path, number: int) -> RoundRecord:
        """Read both files of a round; they are not trusted.

        Raises
        ------
        RecordError
        """
        archive, record = name_files(folder, number)
        try:
            if record.stat().st_size > _MAX_TEXT:
                raise ValueError("it is too large")
            content = json.loads(record.read_bytes())
            if content.pop("format") != FORMAT or content["number"] != number:
                raise ValueError("it is of another round or format")
            replies = [
                (_check_node(entry.pop("node")), SignedReceipt.from_dict(entry))
                for entry in content.pop("replies")
            ]
            arrays = read_archive(archive, _MAX_ARRAYS)
            found = cls(**content, replies=replies, arrays=arrays)
            found._check_types()
        except FileNotFoundError as error:
            raise RecordError(f"the record of round {number} is missing") from error
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            OSError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            reason = escape(str(error))[:200]
            raise RecordError(
                f"the record of round {number} cannot be read: {reason}"
            ) from error
        return found

    def _check_types(self) -> None:
        numbers = [self.learning_rate, *(self.weights or ())]
        numbers += [] if self.kappa is None else [self.kappa]
        # JSON knows numbers that are not finite; no round has them.
        fine = all(type(n) in (int, float) and abs(n) < 1e300 for n in numbers)
        fine &= type(self.num_malicious_nodes) is int and self.num_malicious_nodes >= 0
        fine &= isinstance(self.model, str) and isinstance(self.session, str)
        fine &= isinstance(self.skipped, bool) and isinstance(self.number, int)
        fine &= self.weights is None or len(self.weights) == len(self.replies)
        if not fine:
            raise ValueError("a value has another type, or is out of range")


def name_folder(checkpoint: Path) -> Path:
    """Return the folder of the records of a run."""
    return checkpoint.with_suffix(".receipts")


def name_files(folder: Path, number: int) -> tuple[Path, Path]:
    """Return the archive and the text of a round."""
    return folder / f"{number:06}.npz", folder / f"{number:06}.json"


def _check_node(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"node={value!r:.40}")
    return value


def _write(text: bytes, file: BinaryIO) -> None:
    file.write(text)
