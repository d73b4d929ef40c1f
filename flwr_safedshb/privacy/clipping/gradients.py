"""Clipped sums of per-example gradients (Alg. 1, lines 4 and 5) for torch models.

One interface. How a batch goes through the model is a matter of `passes`, whether a
model can be trained privately one of `checks`, and the numbers one of `sums`.

Formal guarantees
-----------------
- Exchanging one example of a batch for any other moves the sum, as the floating-point
  numbers that it is, by at most 2C, and leaving its place empty moves it by at most C,
  whatever the weights and the other examples are (`sums` has the proof).
- No example's contribution depends on another example, of this batch or of an earlier
  one (`passes`).
- An example that the model or the loss cannot take, or whose loss or gradient is not
  finite, contributes zero, and the others are what they are without it: nothing is
  computed again (`total`).
- How a batch is computed depends on types and shapes alone.
"""

from __future__ import annotations

import itertools
import math
from typing import cast

import torch
from torch import nn

from flwr_safedshb.privacy.bad_examples import log_unusable
from flwr_safedshb.privacy.clipping.backward import (
    PerExampleBackward,
    copy_batch,
    flush_denormals,
)
from flwr_safedshb.privacy.clipping.clipped_sum import (
    MAX_CLIP,
    MIN_CLIP,
    WIDE,
    clip_and_sum,
)
from flwr_safedshb.privacy.clipping.validate_model import (
    check_model,
    find_backward,
    refuse_global_hooks,
)
from flwr_safedshb.privacy.datasets import Batch, Example, index_batch, tensors_of
from flwr_safedshb.privacy.losses import Loss, PerExampleLoss, UnsupportedModelError
from flwr_safedshb.privacy.plan import Clipping

__all__ = ["ClippedGradients", "Loss", "UnsupportedModelError", "check_model"]

# Elements of examples' gradients that are held at a time: 512 and 16 MiB of float32.
MAX_HELD: dict[Clipping, int] = {"per-example": 2**27, "ghost": 2**22}


class ClippedGradients:
    """Sums the clipped gradients of a batch's examples.

    It works on a copy that shares the model's weights: the model itself is never
    modified, and its current weights are used in every call. The copy is in training
    mode, except for batch norms that were frozen.

    Parameters
    ----------
    model : nn.Module
        First axis of inputs and outputs: examples.
    loss : callable
        See `PerExampleLoss`.
    clip_norm : float
        C.
    clipping : {"per-example", "ghost"}
        How much memory gradients of examples may take (`MAX_HELD`), where they must be
        formed: in less, fewer examples are worked on at a time.

    Attributes
    ----------
    most_wide : int
        Models of up to so many parameters are summed in float64.
    """

    most_wide = WIDE

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        clip_norm: float,
        clipping: Clipping = "per-example",
    ) -> None:
        if not MIN_CLIP <= clip_norm <= MAX_CLIP:
            raise ValueError(
                f"clip_norm={clip_norm} must lie in [{MIN_CLIP:.1g}, {MAX_CLIP:.1g}]"
            )
        if clipping not in MAX_HELD:
            raise ValueError(f"clipping={clipping!r}: use 'per-example' or 'ghost'")
        check_model(model)
        self.model, self.clip_norm, self.clipping = model, clip_norm, clipping
        self._loss = PerExampleLoss(loss)
        # Where parameters are: to walk through the model in every step takes longer
        # than a small one's gradients, and to keep them would miss a replaced one.
        paths = [name.rpartition(".") for name, _ in model.named_parameters()]
        self._homes = [(model.get_submodule(path), name) for path, _, name in paths]
        self.size = sum(p.numel() for p in self.trained)
        small = self.size <= self.most_wide
        wide = small or any(p.dtype == torch.float64 for p in self.trained)
        self._dtype = torch.float64 if wide else torch.float32
        self._paths: dict[object, PerExampleBackward] = {}
        self._logged = False

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters of the model that require a gradient, in its order."""
        return [p for p in self._parameters() if p.requires_grad]

    def _parameters(self) -> list[nn.Parameter]:
        found = [layer._parameters[name] for layer, name in self._homes]
        return cast(list[nn.Parameter], found)

    @property
    def path(self) -> str:
        """In words, how examples are kept apart; nothing before `prepare`."""
        return ", ".join(dict.fromkeys(path.words for path in self._paths.values()))

    def prepare(self, inputs: Batch, targets: Batch) -> PerExampleBackward:
        """Find out, with made-up examples, how to treat examples like these.

        A call does so by itself; asked beforehand, a model that cannot be trained is
        refused before anything is charged. Of the examples only shapes and types
        matter.

        Raises
        ------
        UnsupportedModelError
        """
        refuse_global_hooks()
        tensors = tensors_of(inputs, targets)
        kind = tuple((tuple(tensor.shape[1:]), tensor.dtype) for tensor in tensors)
        if kind not in self._paths:
            like = inputs, targets
            self._paths[kind] = find_backward(self.model, self._loss, like, self._dtype)
        return self._paths[kind]

    def __call__(self, inputs: Batch, targets: Batch) -> list[torch.Tensor]:
        """Return the sum of the examples' clipped gradients.

        Parameters
        ----------
        inputs, targets : Tensor, shape (k, ...), or nested tuples, lists or dicts
            k may be 0; then the sum is 0.

        Returns
        -------
        list of Tensor
            One per parameter that requires a gradient, of its shape, in the order of
            ``model.parameters()``; in float32 or float64.
        """
        flat, trained = self.flat_sum(inputs, targets), self.trained
        parts = torch.split(flat, [p.numel() for p in trained])
        return [part.view(p.shape) for part, p in zip(parts, trained, strict=True)]

    def flat_sum(
        self, inputs: Batch, targets: Batch, usable: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sum of the examples' clipped gradients as one vector, (d,)."""
        return self.sum_groups(inputs, targets, 1, usable)[0]

    def sum_groups(
        self,
        inputs: Batch,
        targets: Batch,
        groups: int,
        usable: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the sums of the clipped gradients of equal parts of a batch.

        See `consume`, which this calls with a copy of the batch.
        """
        return self.consume((copy_batch(inputs), copy_batch(targets)), groups, usable)

    def consume(
        self, batch: Example, groups: int = 1, usable: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sums of the clipped gradients of equal parts of a batch.

        The batch must be a copy: a layer that works in place overwrites it.

        Parameters
        ----------
        batch : (inputs, targets), as in a call, (groups * k, ...)
            One group after the other.
        groups : int
        usable : Tensor of bool, shape (groups * k,), optional
            False for places that are empty: what stands there contributes zero.

        Returns
        -------
        Tensor, shape (groups, d)
            In float32 or float64.
        """
        inputs, targets = batch
        counts = {tensor.shape[0] for tensor in tensors_of(inputs, targets)}
        if len(counts) != 1:
            raise ValueError(f"inputs and targets must pair up, got {sorted(counts)}")
        (count,) = counts
        if count == 0:
            return torch.zeros(groups, self.size, device=self.trained[0].device)
        path = self.prepare(inputs, targets)
        with path.lock, flush_denormals():
            return self._consume(path, batch, groups, usable)

    def _consume(
        self,
        path: PerExampleBackward,
        batch: Example,
        groups: int,
        usable: torch.Tensor | None,
    ) -> torch.Tensor:
        inputs, targets = batch
        for mine, given in zip(path.parameters, self._parameters(), strict=True):
            mine.data = given.data
        if path.buffers:
            for own, theirs in zip(path.buffers, self.model.buffers(), strict=True):
                own.copy_(theirs)
        most = max(1, MAX_HELD[self.clipping] // max(1, path.held))
        count = len(tensors_of(targets)[0])
        each = count // groups
        if count <= most:
            return self._sums(path, batch, (groups, each), usable, each)
        # One group after the other, in parts where one alone is too large.
        out = torch.zeros(groups, self.size, dtype=torch.float64)
        for group, first in itertools.product(range(groups), range(0, each, most)):
            size = min(most, each - first)
            part = slice(group * each + first, group * each + first + size)
            some = None if usable is None else usable[part]
            few = index_batch(inputs, part), index_batch(targets, part)
            out[group] += self._sums(path, few, (1, size), some, each)[0]
        return out

    def _sums(
        self,
        path: PerExampleBackward,
        batch: Example,
        shape: tuple[int, int],
        usable: torch.Tensor | None,
        whole: int,
    ) -> torch.Tensor:
        parts, losses = path.run(*batch)
        if not math.isfinite(losses.sum()):
            finite = losses.isfinite()
            self._log_infinite(finite, usable)
            usable = finite if usable is None else finite & usable
        if not parts:  # no gradient leads anywhere
            return torch.zeros(shape[0], self.size)
        numbers = (*shape, self.size), self.clip_norm, path.dtype
        return clip_and_sum(parts, *numbers, usable, whole)

    def _log_infinite(self, finite: torch.Tensor, usable: torch.Tensor | None) -> None:
        """Write to the node's log that examples have no finite loss, once."""
        lost = ~finite if usable is None else usable & ~finite
        if not self._logged and (count := int(lost.sum())):
            self._logged = True
            log_unusable(count, ArithmeticError("the loss is not finite"))
