"""Which examples are held out of training, and what each part is charged for.

Held-out examples pay for evaluations only, the others for training only. Every charge
holds a digest of the data, in the node's order, and of the held-out indices: where
either has changed the digest differs, and then each example pays for both.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from flwr_safedshb.privacy.datasets import ArrayExamples, Examples
from flwr_safedshb.privacy.ledger.ledger import LedgerError
from flwr_safedshb.privacy.plan import PrivacyPlan

# Which examples are held out: the same for the same number, whatever the data are.
_SPLIT_SEED = 20231118
_KEY_NAME = "safedshb.key"
_KEY_BYTES = 32


def split_examples(examples: Examples, held_out: int) -> tuple[Examples, Examples]:
    """Return the examples that train, and those held out for evaluations."""
    size = examples.size
    if held_out >= size:
        raise ValueError(
            f"held_out={held_out} of {size} examples leaves none to train on; lower it"
        )
    aside = _draw_held_out(size, held_out)
    others = np.setdiff1d(np.arange(size), aside)
    return examples.select(others), examples.select(aside)


def _draw_held_out(size: int, held_out: int) -> NDArray[np.int64]:
    """Return the indices of the examples that are held out, in increasing order."""
    order = np.random.default_rng(_SPLIT_SEED).permutation(size)
    return np.sort(order[:held_out])


def split_plans(
    plan: PrivacyPlan, evaluation: PrivacyPlan, data: Examples, folder: Path | None
) -> tuple[PrivacyPlan, PrivacyPlan]:
    """Return the plans of the trained and the held-out part, tagged by a data digest.

    Data that are read one by one have no digest: then each example pays for both.

    Parameters
    ----------
    plan, evaluation : PrivacyPlan
        For all examples.
    data : Examples
        All of the node's, in its order.
    folder : Path, optional
        Of the node's ledger; None for a simulation, which needs no digest.
    """
    if not isinstance(data, ArrayExamples):
        return plan, evaluation
    digest = "0" * 16
    if folder is not None:
        sizes = plan.num_examples, evaluation.num_examples
        digest = _digest_split(data, sizes, _load_key(folder))
    return (
        replace(plan, part=f"trained:{digest}"),
        replace(evaluation, part=f"held-out:{digest}"),
    )


def _digest_split(data: ArrayExamples, sizes: tuple[int, int], key: bytes) -> str:
    """Return a keyed digest of the data and of which examples are held out."""
    mark = hmac.new(key, digestmod=hashlib.sha256)
    mark.update(repr(sizes).encode())
    # Another version of numpy may permute otherwise, so the indices count.
    mark.update(_draw_held_out(sum(sizes), sizes[1]).astype("<i8").tobytes())
    for tensor in data.tensors:
        mark.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        mark.update(flat.view(torch.uint8).numpy().data)
    return mark.hexdigest()[:16]


def _load_key(folder: Path) -> bytes:
    """Return the node's secret key, made at the first call.

    Owners show their ledgers to others, and a plain digest would reveal the last
    example to somebody who knows all the others. A lost key costs a new digest: each
    example then pays for both parts.
    """
    path = folder / _KEY_NAME
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=folder) as file:  # for its owner alone
            file.write(os.urandom(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
            with suppress(FileExistsError):
                os.link(file.name, path)  # atomic, and replaces nothing
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise LedgerError(f"the key {path} is damaged; remove it, at the cost of a sum")
    return key
