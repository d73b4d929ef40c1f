"""Examples of a candidate in the forms in which a client has them."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import Dataset

from flwr_safedshb.audit.candidate import Form
from flwr_safedshb.audit.target_model import Batch
from flwr_safedshb.privacy.datasets import ArrayExamples, DrawnBatch, ItemExamples


class _Readable(Dataset[object]):
    """Pairs of rows, of which some cannot be read."""

    def __init__(self, batch: Batch, usable: torch.Tensor) -> None:
        self._batch, self._usable = batch, usable.tolist()

    def __len__(self) -> int:
        return len(self._usable)

    def __getitem__(self, index: int) -> object:
        if not self._usable[index]:
            raise OSError("this item is made not to be read")
        inputs, targets = self._batch
        return inputs[index], targets[index]


def read_batch(form: Form, batch: Batch, usable: torch.Tensor) -> DrawnBatch:
    """Return a batch as a client reads it, with the places that count.

    Parameters
    ----------
    form : {"batch", "arrays", "items"}
    batch : (inputs, targets)
    usable : Tensor of bool, shape (k,)
        Other places were not drawn; of items, the items there cannot be read.
    """
    inputs, targets = batch
    every = np.arange(len(targets))
    if form == "arrays":
        return ArrayExamples(inputs, targets).read_batch(every, usable.numpy())
    if form == "items":
        like = torch.zeros_like(inputs[0]), torch.zeros_like(targets[0])
        return ItemExamples(_Readable(batch, usable), like=like).read_batch(every)
    return inputs.clone(), targets.clone(), usable
