"""One private gradient: Alg. 1, lines 4 to 6, the only function that touches data.

The client sends what this returns (through its momentum) and nothing else, and the
audit measures this very function.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset, TensorDataset, default_collate

from flwr_safedshb.privacy.clipping.gradients import ClippedGradients, Loss
from flwr_safedshb.privacy.examples import (
    Batch,
    Data,
    Example,
    joined,
    log_unusable,
    spec,
    tensors_of,
)
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.randomness.noise import Randomness, rounded

Vector = npt.NDArray[np.float32]
Layers = list[Vector]
Drawn = tuple[Batch, Batch, torch.Tensor | None]

# Values that get their noise at a time: few, so that they stay in the cache and the
# noise takes little memory beside the model.
BLOCK = 2**16


@dataclass(frozen=True)
class Draw:
    """Whose examples a gradient is of, and how private it is.

    Attributes
    ----------
    dataset : Dataset of (input, target), or a pair of tensors of shape (m, ...)
        The private examples; tensors, nests of them and `TensorDataset` are indexed as
        a whole. Their number, and the shape and type of an example, are taken to be
        public.
    plan : PrivacyPlan
        ``num_examples`` must be the size of the dataset.
    randomness : Randomness
        Source of the batch and of the noise.
    """

    dataset: Data
    plan: PrivacyPlan
    randomness: Randomness


def prepare(gradients: ClippedGradients, dataset: Data) -> None:
    """Refuse a model that cannot be trained privately on examples like these.

    It works on made-up examples, and costs no privacy: a client asks before it charges
    its budget for a step.

    Raises
    ------
    UnsupportedModelError
        If the model or the loss cannot be used, with the reason.
    """
    like = typical(dataset)
    if like is not None:
        gradients.prepare(*like)


def private_gradient(
    gradients: ClippedGradients | tuple[nn.Module, Loss],
    dataset: Data,
    plan: PrivacyPlan,
    randomness: Randomness,
    weight_decay: float = 0.0,
) -> Layers:
    """Sample a batch, clip every example's gradient, average, add noise.

    See `private_vector`; a pair of model and loss is prepared here.

    Returns
    -------
    list of ndarray of float32
        One per trainable parameter, of its shape, in the order of
        ``model.parameters()``.
    """
    if isinstance(gradients, tuple):
        model, loss = gradients
        gradients = ClippedGradients(model, loss, plan.clip_norm, plan.clipping)
    prepare(gradients, dataset)
    vector = private_vector(gradients, Draw(dataset, plan, randomness), weight_decay)
    weights = gradients.trained
    parts = torch.split(torch.from_numpy(vector), [w.numel() for w in weights])
    pairs = zip(parts, weights, strict=True)
    return [part.view(weight.shape).numpy() for part, weight in pairs]


def private_vector(
    gradients: ClippedGradients, draw: Draw, weight_decay: float = 0.0
) -> Vector:
    """Sample a batch, clip every example's gradient, average, add noise.

    An example that cannot be read, or that the model or the loss cannot take,
    contributes zero: whatever the examples are, there is an answer.

    Parameters
    ----------
    gradients : ClippedGradients
        Prepared once for many steps; its clip must be the plan's.
    draw : Draw
    weight_decay : float
        lambda: adds ``weight_decay`` times the weights after the noise, which costs no
        privacy because the weights came from the server.

    Returns
    -------
    ndarray of float32, shape (d,)
        g~_t = (1/b) sum Clip(g; C) + N(0, sigma_DP^2 I), all trainable parameters in a
        row, in the order of ``model.parameters()``. The divisor is the plan's b
        whatever the size of the batch, and an empty batch still gets its noise.

    Raises
    ------
    UnsupportedModelError, ValueError
        As `prepare`, or if arguments do not fit each other; nothing that depends on
        the values of the examples.
    """
    batch = sampled(gradients, draw)
    if batch is None:
        total = torch.zeros(gradients.size)
    else:
        with unwarned():
            total = gradients.flat_sum(*batch)
    return released(gradients, total, draw, weight_decay)


def unwarned() -> AbstractContextManager[object]:
    """Keep warnings back, which may quote the data, and come as often as these say."""
    return warnings.catch_warnings(action="ignore")


def _check(gradients: ClippedGradients, dataset: Data, plan: PrivacyPlan) -> None:
    if gradients.clip_norm != plan.clip_norm:
        raise ValueError(
            f"the gradients are clipped at {gradients.clip_norm}, the plan says "
            f"clip_norm={plan.clip_norm}; they must be equal"
        )
    tensors = whole_tensors(dataset)
    parts = [cast(Sized, dataset)] if tensors is None else tensors_of(*tensors)
    sizes = {len(part) for part in parts}
    if sizes != {plan.num_examples}:
        raise ValueError(
            f"num_examples={plan.num_examples} must be the size of the dataset, got "
            f"{', '.join(map(str, sorted(sizes)))}; make the plan for this dataset"
        )


def whole_tensors(dataset: Data) -> Example | None:
    """Return inputs and targets if they are whole tensors, or nests of them."""
    parts = dataset.tensors if isinstance(dataset, TensorDataset) else dataset
    if not isinstance(parts, tuple | list) or len(parts) != 2:
        return None
    inputs, targets = parts
    # A list of two is also a dataset of two examples.
    if isinstance(parts, list) and not all(map(torch.is_tensor, parts)):
        return None
    return inputs, targets


def typical(dataset: Data) -> Example | None:
    """Return inputs and targets with the shape and type that examples have.

    Of a dataset that is read one by one, what most of the first three examples that can
    be read have: an odd one among them decides nothing. None if none can be read.
    """
    tensors = whole_tensors(dataset)
    if tensors is not None:
        return tensors
    found: list[Example] = []
    for index in range(len(cast(Sized, dataset))):
        example = read_example(dataset, index)
        found += [] if example is None else [example]
        if len(found) == 3:
            break
    if not found:
        return None
    kinds = [spec(*example) for example in found]
    return found[kinds.index(max(kinds, key=kinds.count))]


def read_example(dataset: Data, index: int) -> Example | None:
    """Return an example as a batch of one; None if it cannot be read."""
    try:
        inputs, targets = default_collate([cast(Dataset[Example], dataset)[index]])
    except Exception as error:
        log_unusable(1, error)
        return None
    return inputs, targets


def sampled(gradients: ClippedGradients, draw: Draw) -> Drawn | None:
    """Sample a batch: its inputs, its targets, and which of them count, if any.

    An example that cannot be read, or that is unlike the others in shape or type, keeps
    its place in the batch, which another then fills, as it fills an empty one.
    """
    _check(gradients, draw.dataset, draw.plan)
    batch = draw.plan.sampler.draw(draw.plan, draw.randomness)
    like = typical(draw.dataset)
    if like is None or not len(batch):
        return None
    chosen, taken = _placed(batch, draw)
    if whole_tensors(draw.dataset) is not None:
        index = torch.from_numpy(chosen)
        usable = None if taken is None else torch.from_numpy(taken)

        def chosen_of(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.index_select(0, index.to(tensor.device))

        inputs, targets = (
            chosen_of(part)
            if isinstance(part, torch.Tensor)  # most are, and a nest takes longer
            else tree_map_only(torch.Tensor, chosen_of, part)
            for part in like
        )
        return inputs, targets, usable
    drawn_there = np.ones(len(chosen), bool) if taken is None else taken
    both = zip(chosen.tolist(), drawn_there, strict=True)
    with unwarned():
        read = [
            read_example(draw.dataset, index) if drawn else None
            for index, drawn in both
        ]
    pairs = [like if p is None or spec(*p) != spec(*like) else p for p in read]
    inputs, targets = joined([x for x, _ in pairs]), joined([y for _, y in pairs])
    return inputs, targets, torch.tensor([pair is not like for pair in pairs])


def _placed(
    batch: npt.NDArray[np.int64], draw: Draw
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_] | None]:
    """Return examples for all places of a batch, and which were drawn, if not all."""
    # Seeded noise protects nobody, and need not pay for it.
    private = draw.randomness.private
    places = draw.plan.sampler.places(draw.plan) if private else len(batch)
    count = -(-len(batch) // places) * places
    if count == len(batch):
        return batch, None
    chosen, taken = np.full(count, batch[0]), np.zeros(count, bool)
    at = draw.randomness.subset(count, len(batch))
    chosen[at], taken[at] = batch, True
    return chosen, taken


def released(
    gradients: ClippedGradients, sums: torch.Tensor, draw: Draw, weight_decay: float
) -> Vector:
    """Return (1/b) sums + noise, in float64 until the end (Alg. 1, line 6), and decay.

    Parameters
    ----------
    gradients : ClippedGradients
        Of the model that decays.
    sums : Tensor, shape (d,)
        Of clipped gradients; it is overwritten.
    draw, weight_decay
        See `private_vector`.
    """
    if not 0.0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay={weight_decay} must be at least 0 and finite")
    plan, source, total = draw.plan, draw.randomness, sums.cpu().numpy()
    # Seeded noise protects nobody, and need not pay for it.
    hides = source.private and plan.noise_std > 0
    for start in range(0, len(total), BLOCK):
        block = total[start : start + BLOCK]
        noisy = source.gaussian(len(block), plan.noise_std)
        noisy += block / np.float64(plan.batch_size)
        block[:] = rounded(noisy, plan.noise_std) if hides else noisy
    vector = total.astype(np.float32, copy=False)
    if weight_decay:
        vector += weight_decay * np.concatenate([_flat(w) for w in gradients.trained])
    return vector


def _flat(tensor: torch.Tensor) -> npt.NDArray[np.floating]:
    # Through float32, which numpy has, unless it is wider.
    wide = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
    return wide.cpu().numpy().reshape(-1)
