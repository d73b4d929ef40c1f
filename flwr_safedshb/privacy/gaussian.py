"""One private gradient: Alg. 1, lines 4 to 6, the only function that touches data.

The client sends what this returns (through its momentum) and nothing else, and the
audit measures this very function.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from flwr_safedshb.privacy.clipping.batches import Batch, joined, leaves, rows, spec
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients, Loss
from flwr_safedshb.privacy.clipping.losses import log_unusable
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.randomness.noise import Randomness, rounded
from flwr_safedshb.privacy.samplers import sample

Example = tuple[torch.Tensor, torch.Tensor]
Data = Dataset[Example] | tuple[torch.Tensor, torch.Tensor]
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
        The private examples; tensors and `TensorDataset` are indexed as a whole. Their
        number, and the shape and type of an example, are taken to be public.
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
    like = _like(dataset)
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

    See `private_gradients`; a pair of model and loss is prepared here.

    Returns
    -------
    list of ndarray of float32
        One per trainable parameter, of its shape, in the order of
        ``model.parameters()``.
    """
    if isinstance(gradients, tuple):
        model, loss = gradients
        gradients = ClippedGradients(model, loss, plan.clip_norm, plan.clipping)
    draws = [Draw(dataset, plan, randomness)]
    (vector,) = private_gradients(gradients, draws, weight_decay)
    shapes = [tuple(weight.shape) for weight in gradients.trained]
    parts = np.split(vector, np.cumsum([math.prod(shape) for shape in shapes[:-1]]))
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def private_gradients(
    gradients: ClippedGradients, draws: Sequence[Draw], weight_decay: float = 0.0
) -> list[Vector]:
    """Sample, clip, average and add noise for every one of several clients.

    What a client gets depends on its own draw alone. Several that draw as many examples
    go through the model as one batch; then each sum is the same up to its rounding.
    An example that cannot be read, or that the model or the loss cannot take,
    contributes zero: whatever the examples are, there is an answer.

    Parameters
    ----------
    gradients : ClippedGradients
        Prepared once for many steps; its clip must be the plans'.
    draws : sequence of Draw
    weight_decay : float
        lambda: adds ``weight_decay`` times the weights after the noise, which costs no
        privacy because the weights came from the server.

    Returns
    -------
    list of ndarray of float32, shape (d,)
        For each draw g~_t = (1/b) sum Clip(g; C) + N(0, sigma_DP^2 I), all trainable
        parameters in a row, in the order of ``model.parameters()``. The divisor is the
        plan's b whatever the size of the batch, and an empty batch still gets its
        noise.

    Raises
    ------
    UnsupportedModelError, ValueError
        As `prepare`, or if arguments do not fit each other; nothing that depends on
        the values of the examples.
    """
    likes = []
    for draw in draws:
        _check(gradients, draw.dataset, draw.plan, weight_decay)
        likes.append(like := _like(draw.dataset))
        if like is not None:
            gradients.prepare(*like)
    # A warning may quote the data, and how often it comes may depend on them.
    with warnings.catch_warnings(action="ignore"):
        sums = _sums(
            gradients, [_drawn(*pair) for pair in zip(draws, likes, strict=True)]
        )
    released = [_release(*pair) for pair in zip(sums, draws, strict=True)]
    if weight_decay:
        decay = weight_decay * np.concatenate([_flat(w) for w in gradients.trained])
        for vector in released:
            vector += decay
    return released


def _check(
    gradients: ClippedGradients, dataset: Data, plan: PrivacyPlan, weight_decay: float
) -> None:
    if gradients.clip_norm != plan.clip_norm:
        raise ValueError(
            f"the gradients are clipped at {gradients.clip_norm}, the plan says "
            f"clip_norm={plan.clip_norm}; they must be equal"
        )
    sizes = {len(part) for part in _tensors(dataset) or (cast(list[Example], dataset),)}
    if sizes != {plan.num_examples}:
        raise ValueError(
            f"num_examples={plan.num_examples} must be the size of the dataset, got "
            f"{', '.join(map(str, sorted(sizes)))}; make the plan for this dataset"
        )
    if not (np.isfinite(weight_decay) and weight_decay >= 0):
        raise ValueError(f"weight_decay={weight_decay} must be at least 0 and finite")


def _tensors(dataset: Data) -> Sequence[torch.Tensor] | None:
    """Return inputs and targets if they are whole tensors."""
    tensors = dataset.tensors if isinstance(dataset, TensorDataset) else dataset
    if isinstance(tensors, tuple | list) and len(tensors) == 2:
        inputs, targets = tensors
        if torch.is_tensor(inputs) and torch.is_tensor(targets):
            return inputs, targets
    return None


def _like(dataset: Data) -> tuple[Batch, Batch] | None:
    """Return inputs and targets with the shape and type that examples have.

    Of a dataset that is read one by one, what most of the first three examples that can
    be read have: an odd one among them decides nothing. None if none can be read.
    """
    tensors = _tensors(dataset)
    if tensors is not None:
        return tensors[0], tensors[1]
    found: list[tuple[Batch, Batch]] = []
    for index in range(len(cast(Sized, dataset))):
        example = _read(dataset, index)
        found += [] if example is None else [example]
        if len(found) == 3:
            break
    if not found:
        return None
    kinds = [spec(*example) for example in found]
    return found[kinds.index(max(kinds, key=kinds.count))]


def _read(dataset: Data, index: int) -> tuple[Batch, Batch] | None:
    """Return an example as a batch of one; None if it cannot be read."""
    try:
        inputs, targets = default_collate([cast(Dataset[Example], dataset)[index]])
    except Exception as error:
        log_unusable(1, error)
        return None
    return inputs, targets


def _drawn(draw: Draw, like: tuple[Batch, Batch] | None) -> Drawn | None:
    """Sample a batch: its inputs, its targets, and which of them count, if any.

    An example that cannot be read, or that is unlike the others in shape or type, keeps
    its place in the batch, which another then fills.
    """
    batch = sample(draw.plan, draw.randomness)
    tensors = _tensors(draw.dataset)
    if tensors is not None:
        chosen = torch.from_numpy(batch)
        x, y = (t.index_select(0, chosen.to(t.device)) for t in tensors)
        return x, y, None
    if like is None:
        return None
    read = [_read(draw.dataset, int(index)) for index in batch]
    pairs = [like if p is None or spec(*p) != spec(*like) else p for p in read]
    # One more, so that there is something to join, and away with it.
    inputs = rows(joined([*(x for x, _ in pairs), like[0]]), slice(len(batch)))
    targets = rows(joined([*(y for _, y in pairs), like[1]]), slice(len(batch)))
    return inputs, targets, torch.tensor([pair is not like for pair in pairs])


def _sums(
    gradients: ClippedGradients, drawn: Sequence[Drawn | None]
) -> list[npt.NDArray[np.floating]]:
    """Return the clipped sum of each batch, (d,), all parameters in a row."""
    some = [each for each in drawn if each is not None]
    kinds = {(spec(x, y), len(leaves(y)[0]), good is None) for x, y, good in some}
    if len(some) == len(drawn) > 1 == len(kinds):
        inputs = joined([x for x, _, _ in some])
        targets = joined([y for _, y, _ in some])
        masks = [good for _, _, good in some if good is not None]
        usable = torch.cat(masks) if masks else None
        sums = gradients.grouped(inputs, targets, len(drawn), usable)
        return list(sums.cpu().numpy())
    nothing = torch.zeros(gradients.size)
    vectors = [nothing if e is None else gradients.flat_sum(*e) for e in drawn]
    return [vector.cpu().numpy() for vector in vectors]


def _release(total: npt.NDArray[np.floating], draw: Draw) -> Vector:
    """(1/b) total + noise, in float64 until the end (Alg. 1, line 6)."""
    plan = draw.plan
    # Seeded noise protects nobody, and need not pay for it.
    hides = draw.randomness.private and plan.noise_std > 0
    for start in range(0, len(total), BLOCK):
        block = total[start : start + BLOCK]
        noisy = draw.randomness.gaussian(len(block), plan.noise_std)
        noisy += block / np.float64(plan.batch_size)
        block[:] = rounded(noisy, plan.noise_std) if hides else noisy
    return total.astype(np.float32, copy=False)


def _flat(tensor: torch.Tensor) -> npt.NDArray[np.floating]:
    # Through float32, which numpy has, unless it is wider.
    wide = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
    return wide.cpu().numpy().reshape(-1)
