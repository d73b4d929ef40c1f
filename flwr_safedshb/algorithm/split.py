"""Hold examples out of training, and charge each part for its own use only.

With persons as the unit, persons are held out, and whatever is said here of examples
holds for persons.

Held-out examples are charged for evaluations only, the others for training only. Every
charge contains a digest of the data, in the node's order, and of the held-out indices.
If either has changed, the digests differ and each example is charged for both.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from flwr_safedshb.privacy.ledger.ledger import LedgerError
from flwr_safedshb.privacy.owners import PrivateData
from flwr_safedshb.privacy.plan import PrivacyPlan

# Fixed, so that the held-out indices depend on nothing but the two sizes.
_SPLIT_SEED = 20231118
_KEY_NAME = "safedshb.key"
_KEY_BYTES = 32


def split_examples(
    examples: PrivateData, held_out: int
) -> tuple[PrivateData, PrivateData]:
    """Return the examples to train on, and those held out for evaluations."""
    size = examples.size
    if held_out >= size:
        raise ValueError(
            f"held_out={held_out} of {size} examples leaves none to train on; lower it"
        )
    indices = _draw_held_out(size, held_out)
    others = np.setdiff1d(np.arange(size), indices)
    return examples.select(others), examples.select(indices)


def _draw_held_out(size: int, held_out: int) -> NDArray[np.int64]:
    """Return the indices of the examples that are held out, in increasing order."""
    order = np.random.default_rng(_SPLIT_SEED).permutation(size)
    return np.sort(order[:held_out])


def split_plans(
    plan: PrivacyPlan, evaluation: PrivacyPlan, data: PrivateData, folder: Path | None
) -> tuple[PrivacyPlan, PrivacyPlan]:
    """Return the plans of the trained and the held-out part, tagged by a data digest.

    Data that are read one by one have no digest: then each example is charged for both.

    Parameters
    ----------
    plan, evaluation : PrivacyPlan
        Plans for all examples.
    data : Examples or OwnedExamples
        All examples of the node, in its order.
    folder : Path, optional
        The folder of the node's ledger; None for a simulation, which needs no digest.
    """
    if data.tensors is None:
        return plan, evaluation
    digest = "0" * 16
    if folder is not None:
        sizes = plan.num_examples, evaluation.num_examples
        digest = _digest_split(data.tensors, sizes, _load_key(folder))
    return (
        replace(plan, part=f"trained:{digest}"),
        replace(evaluation, part=f"held-out:{digest}"),
    )


def _digest_split(
    tensors: Sequence[torch.Tensor], sizes: tuple[int, int], key: bytes
) -> str:
    """Return a keyed digest of the data and of which examples are held out."""
    digest = hmac.new(key, digestmod=hashlib.sha256)
    digest.update(repr(sizes).encode())
    # The indices too, because another version of numpy may permute differently.
    digest.update(_draw_held_out(sum(sizes), sizes[1]).astype("<i8").tobytes())
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _load_key(folder: Path) -> bytes:
    """Return the node's secret key; create it at the first call.

    Owners show their ledgers to others, and a digest without a key would reveal the
    last example to somebody who knows all the others. A new key means a new digest, so
    each example is then charged for both uses.
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
        raise LedgerError(
            f"the key {path} is damaged; remove it, and each "
            "example is charged for training and evaluation"
        )
    return key
