"""Clipped sums of per-example gradients (Alg. 1, lines 4 and 5) for torch models.

`validate_model` decides whether a model can be trained privately, `backward` keeps its
examples apart, and `clipped_sum` bounds their sum.

Formal guarantees
-----------------
- Replacing one example of a batch changes the sum by at most 2C, and removing it (its
  place stays, empty) by at most C. This holds for the sums as floating-point numbers,
  whatever the weights and the other examples are (`clipped_sum` has the proof).
- No example's contribution depends on another example, of this batch or of an earlier
  one (`backward`).
- An example that the model or the loss cannot take, or whose loss or gradient is not
  finite, contributes zero, and the others contribute what they would without it
  (`total_functions`); nothing is computed twice.
- The way in which a batch is computed depends on dtypes and shapes alone.
- With `per_owner` all of this holds for persons: exchanging all examples of a person
  for any others, in any number, changes the sum by at most 2C, and leaving the person
  out by at most C.
"""

from __future__ import annotations

import itertools
import math
from typing import cast

import torch
from torch import nn

from flwr_safedshb.privacy.bad_examples import log_unusable
from flwr_safedshb.privacy.batches import (
    Batch,
    Example,
    copy_batch,
    count_examples,
    index_batch,
    tensors_of,
)
from flwr_safedshb.privacy.clipping.backward import (
    OwnerPlaces,
    PerExampleBackward,
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
from flwr_safedshb.privacy.losses import Loss, PerExampleLoss, UnsupportedModelError
from flwr_safedshb.privacy.plan import Clipping

__all__ = ["ClippedGradients", "Loss", "UnsupportedModelError", "check_model"]

# The most elements of per-example gradients in memory at a time: 512 and 16 MiB of
# float32.
MAX_HELD_ELEMENTS: dict[Clipping, int] = {"per-example": 2**27, "ghost": 2**22}


class ClippedGradients:
    """Sum the clipped gradients of a batch's examples.

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
        How much memory per-example gradients may take (`MAX_HELD_ELEMENTS`) where
        they must be formed. With less memory, the chunks of a batch are smaller.
    per_owner : int
        K. With K > 1 the unit that is clipped is the person: a batch has K places in a
        row for each, and the mean gradient over a person's usable places is clipped.

    Attributes
    ----------
    max_float64_size : int
        Models of up to so many parameters are summed in float64.
    """

    max_float64_size = WIDE

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        clip_norm: float,
        clipping: Clipping = "per-example",
        per_owner: int = 1,
    ) -> None:
        if not MIN_CLIP <= clip_norm <= MAX_CLIP:
            raise ValueError(
                f"clip_norm={clip_norm} must lie in [{MIN_CLIP:.1g}, {MAX_CLIP:.1g}]"
            )
        if clipping not in MAX_HELD_ELEMENTS:
            raise ValueError(f"clipping={clipping!r}: use 'per-example' or 'ghost'")
        check_model(model)
        self.model, self.clip_norm, self.clipping = model, clip_norm, clipping
        self.per_owner = per_owner
        self._loss = PerExampleLoss(loss)
        # The owner and the name of each parameter. Searching the model in every step is
        # slower than the gradients of a small one, and a kept list of parameters would
        # miss one that is replaced.
        paths = [name.rpartition(".") for name, _ in model.named_parameters()]
        self._owners = [(model.get_submodule(path), name) for path, _, name in paths]
        self.size = sum(p.numel() for p in self.trained)
        small = self.size <= self.max_float64_size
        wide = small or any(p.dtype == torch.float64 for p in self.trained)
        self._dtype = torch.float64 if wide else torch.float32
        self._backwards: dict[object, PerExampleBackward] = {}
        self._logged = False

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters of the model that require a gradient, in its order."""
        return [p for p in self._list_parameters() if p.requires_grad]

    def _list_parameters(self) -> list[nn.Parameter]:
        found = [layer._parameters[name] for layer, name in self._owners]
        return cast(list[nn.Parameter], found)

    @property
    def isolation(self) -> str:
        """A description of how examples are kept apart; empty before `prepare`."""
        found = [backward.description for backward in self._backwards.values()]
        return ", ".join(dict.fromkeys(found))

    def prepare(self, inputs: Batch, targets: Batch) -> PerExampleBackward:
        """Choose how to keep examples of these shapes and dtypes apart.

        The choice is tested on synthetic examples. A call prepares by itself. Done
        earlier, this refuses a model that cannot be trained before anything is charged.

        Raises
        ------
        UnsupportedModelError
        """
        refuse_global_hooks()
        tensors = tensors_of(inputs, targets)
        kind = tuple((tuple(tensor.shape[1:]), tensor.dtype) for tensor in tensors)
        if kind not in self._backwards:
            self._backwards[kind] = find_backward(
                self.model, self._loss, (inputs, targets), self._dtype
            )
        return self._backwards[kind]

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
        batch = copy_batch(inputs), copy_batch(targets)
        return self.consume_batch(batch, usable=usable)[0]

    def consume_batch(
        self, batch: Example, groups: int = 1, usable: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sum of the clipped gradients of each group of a batch.

        The batch must be a copy, because layers that work in place overwrite it.

        Parameters
        ----------
        batch : (inputs, targets), as in a call, (groups * k, ...)
            One group after the other; with `per_owner`, (groups * k * K, ...).
        groups : int
        usable : Tensor of bool, as long as the batch, optional
            False for places that count as empty: they contribute zero.

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
        if count % (groups * self.per_owner):
            raise ValueError(
                f"a batch of {count} examples is not {groups} groups of persons with "
                f"{self.per_owner} places each"
            )
        if count == 0:
            return torch.zeros(groups, self.size, device=self.trained[0].device)
        backward = self.prepare(inputs, targets)
        with backward.lock, flush_denormals():
            self._load_weights(backward)
            return self._sum_in_chunks(backward, batch, groups, usable)

    def find_usable(self, inputs: Batch, targets: Batch) -> torch.Tensor:
        """Return which examples have a finite loss, (k,) of bool."""
        backward = self.prepare(inputs, targets)
        with backward.lock, flush_denormals():
            self._load_weights(backward)
            return backward.run(copy_batch(inputs), copy_batch(targets))[1].isfinite()

    def _load_weights(self, backward: PerExampleBackward) -> None:
        """Load the model's current weights and buffers into the backward pass."""
        for own, given in zip(
            backward.parameters, self._list_parameters(), strict=True
        ):
            own.data = given.data
        if backward.buffers:
            given_buffers = self.model.buffers()
            for buffer, source in zip(backward.buffers, given_buffers, strict=True):
                buffer.copy_(source)

    def _sum_in_chunks(
        self,
        backward: PerExampleBackward,
        batch: Example,
        groups: int,
        usable: torch.Tensor | None,
    ) -> torch.Tensor:
        """Sum all groups at once, or each in chunks if they exceed the memory limit."""
        inputs, targets = batch
        places, held = self.per_owner, backward.count_elements(self.per_owner)
        max_count = max(1, MAX_HELD_ELEMENTS[self.clipping] // max(1, held))
        count = count_examples(targets) // places
        each = count // groups
        if count <= max_count:
            return self._sum_chunk(backward, batch, (groups, each), usable, each)
        sums = torch.zeros(groups, self.size, dtype=torch.float64)
        for group, first in itertools.product(range(groups), range(0, each, max_count)):
            size, start = min(max_count, each - first), group * each + first
            rows = slice(start * places, (start + size) * places)
            chunk = index_batch(inputs, rows), index_batch(targets, rows)
            counted = None if usable is None else usable[rows]
            sums[group] += self._sum_chunk(backward, chunk, (1, size), counted, each)[0]
        return sums

    def _sum_chunk(
        self,
        backward: PerExampleBackward,
        chunk: Example,
        shape: tuple[int, int],
        usable: torch.Tensor | None,
        total_count: int,
    ) -> torch.Tensor:
        """Sum chunks of shape (groups, k); each is part of a group of `total_count`."""
        places = OwnerPlaces(self.per_owner, usable) if self.per_owner > 1 else None
        parts, losses = backward.run(*chunk, places)
        if not math.isfinite(losses.sum()):
            finite = losses.isfinite()
            self._log_infinite(finite, usable)
            usable = finite if usable is None else finite & usable
        if usable is not None:
            usable = usable.view(-1, self.per_owner).any(dim=1)
        if not parts:  # the loss depends on no parameter
            return torch.zeros(shape[0], self.size)
        return clip_and_sum(
            parts,
            (*shape, self.size),
            self.clip_norm,
            backward.dtype,
            usable,
            total_count,
        )

    def _log_infinite(self, finite: torch.Tensor, usable: torch.Tensor | None) -> None:
        """Log once, on this node, how many examples have no finite loss."""
        infinite = ~finite if usable is None else usable & ~finite
        if not self._logged and (count := int(infinite.sum())):
            self._logged = True
            log_unusable(count, ArithmeticError("the loss is not finite"))
