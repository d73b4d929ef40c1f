"""One private gradient: Alg. 1, lines 4 to 6, the only function that touches data.

The client sends what this returns (through its momentum) and nothing else, and the
audit measures this very function.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from flwr_safedshb.privacy.clipping.gradients import (
    ClippedGradients,
    Loss,
    UnsupportedModelError,
)
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.randomness.noise import Randomness, rounded
from flwr_safedshb.privacy.samplers import sample

Example = tuple[torch.Tensor, torch.Tensor]
Data = Dataset[Example] | tuple[torch.Tensor, torch.Tensor]
Vector = npt.NDArray[np.float32]
Layers = list[Vector]

# Values that get their noise at a time: few, so that they stay in the cache and the
# noise takes little memory beside the model.
BLOCK = 2**16


class PrivateDataError(RuntimeError):
    """The step failed on private data; the text never says how."""


@dataclass(frozen=True)
class Draw:
    """Whose examples a gradient is of, and how private it is.

    Attributes
    ----------
    dataset : Dataset of (input, target), or a pair of tensors of shape (m, ...)
        The private examples; tensors and `TensorDataset` are indexed as a whole.
    plan : PrivacyPlan
        ``num_examples`` must be the size of the dataset.
    randomness : Randomness
        Source of the batch and of the noise.
    """

    dataset: Data
    plan: PrivacyPlan
    randomness: Randomness


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
    go through the model as one batch if it has closed-form gradients; then each sum is
    the same up to its rounding, in another order.

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
    PrivateDataError
        If reading the examples or differentiating the loss raised: the cause is
        withheld because its text may quote the data. To see it, call
        `ClippedGradients` on the examples, on the machine that may see them.
    UnsupportedModelError
        If the model or the loss has no per-example gradients.
    """
    for draw in draws:
        _check(gradients, draw.dataset, draw.plan, weight_decay)
    batches = [sample(draw.plan, draw.randomness) for draw in draws]
    try:
        # A warning may quote the data, and how often it comes may depend on them.
        with warnings.catch_warnings(action="ignore"):
            sums = _sums(gradients, [draw.dataset for draw in draws], batches)
    except UnsupportedModelError:
        raise  # says something about the model only
    except Exception:
        sums = None
    if sums is None:  # outside the handler, so that no cause is attached
        raise PrivateDataError(
            "the gradient step failed on this client's examples; the cause is withheld "
            "because it may quote them: call ClippedGradients on them locally to see it"
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


def _sums(
    gradients: ClippedGradients,
    datasets: Sequence[Data],
    batches: Sequence[npt.NDArray[np.int64]],
) -> list[npt.NDArray[np.floating]]:
    """Return the clipped sum of each batch, (d,), all parameters in a row."""
    sizes = {len(batch) for batch in batches}
    if len(batches) > 1 and len(sizes) == 1 and sizes != {0}:
        examples = [_chosen(*pair) for pair in zip(datasets, batches, strict=True)]
        inputs, targets = (torch.cat(parts) for parts in zip(*examples, strict=True))
        grouped = gradients.grouped(inputs, targets, len(batches))
        if grouped is not None:
            rows = [layer.flatten(1).cpu().numpy() for layer in grouped]
            return list(np.concatenate(rows, axis=1))
    return [
        np.concatenate([_flat(layer) for layer in gradients(*_chosen(*pair))])
        for pair in zip(datasets, batches, strict=True)
    ]


def _chosen(dataset: Data, batch: npt.NDArray[np.int64]) -> Example:
    """Return inputs and targets of a batch."""
    tensors = _tensors(dataset)
    if tensors is not None:
        chosen = torch.from_numpy(batch)
        inputs, targets = (t.index_select(0, chosen.to(t.device)) for t in tensors)
    elif len(batch):
        examples = cast(Dataset[Example], dataset)
        inputs, targets = default_collate([examples[int(index)] for index in batch])
    else:
        inputs = targets = torch.empty(0)
    return inputs, targets


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
    """Return a view where the tensor is on the processor."""
    return tensor.detach().cpu().numpy().reshape(-1)
