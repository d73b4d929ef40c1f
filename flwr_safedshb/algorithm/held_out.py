"""Examples that are held out of training: which they are, and who pays for them.

They pay for evaluations alone, and the others for training alone: which are which is
decided by their places, and a digest of these places and of the data in the node's
order stands in every charge. Where either has changed there is another digest, and then
each example pays for both.
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
from flwr_safedshb.privacy.ledger.ledger import Ledger, LedgerError
from flwr_safedshb.privacy.plan import PrivacyPlan

# Which examples are held out: the same for the same number, whatever the data are.
_SPLIT_SEED = 20231118
_KEY_NAME = "safedshb.key"
_KEY_BYTES = 32


def divided(examples: Examples, held_out: int) -> tuple[Examples, Examples]:
    """Return the examples that train, and those that evaluate."""
    size = examples.size
    if held_out >= size:
        raise ValueError(
            f"held_out={held_out} of {size} examples leaves none to train on; lower it"
        )
    aside = _held_out(size, held_out)
    others = np.setdiff1d(np.arange(size), aside)
    return examples.subset(others), examples.subset(aside)


def _held_out(size: int, held_out: int) -> NDArray[np.int64]:
    """Return the indices of the examples that are held out, in increasing order."""
    order = np.random.default_rng(_SPLIT_SEED).permutation(size)
    return np.sort(order[:held_out])


def split_plans(
    plan: PrivacyPlan, evaluation: PrivacyPlan, data: Examples, ledger: Ledger | None
) -> tuple[PrivacyPlan, PrivacyPlan]:
    """Return the plans of a node's two parts, under the digest of its data.

    Of data that are read one by one there is no digest: then each example pays for
    both.

    Parameters
    ----------
    plan, evaluation : PrivacyPlan
        For all examples.
    data : Examples
        All of the node's, in its order.
    ledger : Ledger, optional
        None for a simulation.
    """
    if not isinstance(data, ArrayExamples):
        return plan, evaluation
    digest = "0" * 16
    if ledger is not None:
        mark = hmac.new(_key(ledger.path.parent), digestmod=hashlib.sha256)
        sizes = plan.num_examples, evaluation.num_examples
        mark.update(repr(sizes).encode())
        # Another version of numpy may permute otherwise: what counts is who is where.
        mark.update(_held_out(sum(sizes), sizes[1]).astype("<i8").tobytes())
        for tensor in data.tensors:
            mark.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            mark.update(flat.view(torch.uint8).numpy().data)
        digest = mark.hexdigest()[:16]
    return (
        replace(plan, part=f"trained:{digest}"),
        replace(evaluation, part=f"held-out:{digest}"),
    )


def _key(folder: Path) -> bytes:
    """Return the node's key, made at the first call.

    Ledgers are shown to others, and a plain digest would tell whoever knows all
    examples but one which that is. With another key there is another digest, and
    each example pays for both parts.
    """
    path = folder / _KEY_NAME
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=folder) as file:  # for its owner alone
            file.write(os.urandom(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
            with suppress(FileExistsError):
                os.link(file.name, path)  # whole, and never in place of another
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise LedgerError(f"the key {path} is damaged; remove it, at the cost of a sum")
    return key
