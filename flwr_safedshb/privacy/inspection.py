"""Count the examples that cannot be used, and say why, for their owner alone.

What is found depends on the data: a node says it to nobody. It is for ``safedshb
doctor``, which the owner of the data runs, and for simulations, whose seeded noise
protects nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from flwr_safedshb.privacy.bad_examples import silence_log
from flwr_safedshb.privacy.batches import Batch, tensors_of
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.datasets import ArrayExamples, Examples
from flwr_safedshb.privacy.owners import OwnedExamples, PrivateData

# A larger share of unusable examples is a mistake, and no accident.
MAX_UNUSABLE_SHARE = 0.2
# Examples that are looked at together, and weights times examples in all.
_CHUNK, _MAX_WORK = 64, 2**30
# A column so many times as large as the middle one decides every gradient.
_UNSCALED = 100.0
_MAX_NAMED = 5


@dataclass(frozen=True)
class DataReport:
    """What is wrong with examples.

    Attributes
    ----------
    seen, unusable : int
        How many were looked at, and how many of them cannot be used.
    causes : tuple of str
        Each with its remedy.
    """

    seen: int
    unusable: int
    causes: tuple[str, ...]

    @property
    def is_hopeless(self) -> bool:
        """Whether too many examples cannot be used for it to be an accident."""
        return self.unusable > MAX_UNUSABLE_SHARE * self.seen

    def __str__(self) -> str:
        count = f"{self.unusable:,} of {self.seen:,} examples cannot be used"
        return "; ".join([count] * (self.unusable > 0) + [*self.causes])


def inspect_examples(
    gradients: ClippedGradients, data: PrivateData, limit: int | None = None
) -> DataReport:
    """Look at examples one by one, with the model as it is.

    Parameters
    ----------
    gradients : ClippedGradients
    data : Examples or OwnedExamples
    limit : int, optional
        Look at no more than so many, evenly spread; and at fewer if the model is large.
    """
    examples = data.examples if isinstance(data, OwnedExamples) else data
    most = examples.size if limit is None else min(limit, _MAX_WORK // gradients.size)
    count = min(examples.size, max(most, 1))
    chosen = np.unique(np.linspace(0, examples.size - 1, count).astype(np.int64))
    step = max(1, min(_CHUNK, 2**24 // gradients.size))
    readable, finite, labels, largest = [], [], [], []
    with silence_log(), torch.random.fork_rng(devices=[]):
        for start in range(0, len(chosen), step):
            batch = chosen[start : start + step]
            inputs, targets, good = examples.read_batch(batch)
            read = torch.ones(len(batch), dtype=torch.bool) if good is None else good
            readable.append(read)
            finite.append(gradients.find_usable(inputs, targets).cpu())
            labels.append(_get_labels(targets))
            largest.append(_find_largest(inputs, read))
    usable = (torch.cat(readable) & torch.cat(finite)).numpy()
    unread = ~torch.cat(readable).numpy()
    causes = []
    if unread.any():
        causes.append(_describe_unreadable(examples, int(unread.sum())))
    refused = ~usable & ~unread
    if refused.any():
        known = [each for each in labels if each is not None]
        single = np.concatenate(known) if len(known) == len(labels) else None
        causes.append(_describe_refused(single, refused))
    tables = [each for each in largest if each is not None]
    if len(tables) == len(largest):
        causes += _describe_scales(np.stack(tables).max(axis=0))
    return DataReport(len(chosen), int((~usable).sum()), tuple(causes))


def _get_labels(targets: Batch) -> NDArray[np.generic] | None:
    """Return the labels of a batch, (k,), if it has a single one for each example."""
    tensors = tensors_of(targets)
    if len(tensors) != 1 or tensors[0][0].numel() != 1:
        return None
    found: NDArray[np.generic] = tensors[0].detach().reshape(-1).cpu().numpy()
    return found


def _find_largest(inputs: Batch, read: torch.Tensor) -> NDArray[np.float64] | None:
    """Return the largest absolute value of every column, (p,), of a table."""
    tensors = tensors_of(inputs)
    if len(tensors) != 1 or tensors[0].dim() != 2 or tensors[0].shape[1] < 3:
        return None
    rows = tensors[0].detach().cpu().double().abs() * read.unsqueeze(1)
    found: NDArray[np.float64] = rows.amax(dim=0).numpy()
    return found


def _describe_unreadable(examples: Examples, count: int) -> str:
    if isinstance(examples, ArrayExamples):
        inputs = tensors_of(examples.like[0])
        if len(inputs) == 1 and inputs[0].dim() == 2:
            columns = (~inputs[0].isfinite()).any(dim=0).nonzero().flatten().tolist()
            if columns:
                return (
                    f"column {_list(columns)} of the inputs has values that are not "
                    "finite (NaN is a missing value): fill them in, say with a public "
                    "mean, or leave the column out"
                )
        return f"{count:,} have values that are not finite: fill them in"
    return f"{count:,} cannot be read, or have another form than the others"


def _describe_refused(
    labels: NDArray[np.generic] | None, refused: NDArray[np.bool_]
) -> str:
    if labels is None:
        return f"{refused.sum():,} have no finite loss under the first model"
    bad = np.unique(labels[refused])
    return (
        f"labels go from {labels.min():g} to {labels.max():g}, and the loss cannot "
        f"take {_list(bad.tolist())} ({refused.sum():,} examples): for k classes give "
        "0 to k - 1, and the model k outputs"
    )


def _describe_scales(largest: NDArray[np.float64]) -> list[str]:
    middle = float(np.median(largest))
    large = np.flatnonzero(largest > _UNSCALED * middle)
    if middle <= 0.0 or not len(large):
        return []
    return [
        f"column {_list(large.tolist())} goes up to {largest.max():.3g}, and the "
        f"middle one to {middle:.3g}: the large ones decide every gradient; scale all "
        "columns by public bounds, (x - low)/(high - low)"
    ]


def _list(values: Sequence[float]) -> str:
    more = f" and {len(values) - _MAX_NAMED} more" if len(values) > _MAX_NAMED else ""
    return ", ".join(f"{value:g}" for value in values[:_MAX_NAMED]) + more
