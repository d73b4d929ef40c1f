"""One private gradient: Alg. 1, lines 2 and 3, the only function that touches data.

The client sends what this returns (through its momentum) and nothing else, and the
audit measures this very function.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from flwr_safedshb.privacy.gradients import (
    ClippedGradients,
    Loss,
    UnsupportedModelError,
)
from flwr_safedshb.privacy.noise import Randomness
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.sampling import sample

Example = tuple[torch.Tensor, torch.Tensor]
Data = Dataset[Example] | tuple[torch.Tensor, torch.Tensor]
Layers = list[npt.NDArray[np.float32]]

# Values that get their noise at a time: few, so that they stay in the cache and the
# noise takes little memory beside the model.
_BLOCK = 2**16


class PrivateDataError(RuntimeError):
    """The step failed on private data; the text never says how."""


def private_gradient(
    gradients: ClippedGradients | tuple[nn.Module, Loss],
    dataset: Data,
    plan: PrivacyPlan,
    randomness: Randomness,
    weight_decay: float = 0.0,
) -> Layers:
    """Sample a batch, clip every example's gradient, average, add noise.

    Parameters
    ----------
    gradients : ClippedGradients, or (model, loss)
        Prepared once for many steps; its clip must be the plan's. A pair is prepared
        here.
    dataset : Dataset of (input, target), or a pair of tensors of shape (m, ...)
        The private examples; tensors and `TensorDataset` are indexed as a whole.
    plan : PrivacyPlan
        ``num_examples`` must be the size of the dataset.
    randomness : Randomness
        Source of the batch and of the noise.
    weight_decay : float
        lambda: adds ``weight_decay`` times the weights after the noise, which costs no
        privacy because the weights came from the server.

    Returns
    -------
    list of ndarray of float32
        g~_t = (1/b) sum Clip(g; C) + N(0, sigma_DP^2 I), one per trainable parameter in
        the order of ``model.parameters()``. The divisor is the plan's b whatever the
        size of the batch, and an empty batch still gets its noise.

    Raises
    ------
    PrivateDataError
        If reading the examples or differentiating the loss raised: the cause is
        withheld because its text may quote the data. To see it, call
        `ClippedGradients` on the examples, on the machine that may see them.
    UnsupportedModelError
        If the model or the loss has no per-example gradients.
    """
    if isinstance(gradients, tuple):
        model, loss = gradients
        gradients = ClippedGradients(model, loss, plan.clip_norm, plan.clipping)
    _check(gradients, dataset, plan, weight_decay)
    batch = sample(plan, randomness)
    try:
        # A warning may quote the data, and how often it comes may depend on them.
        with warnings.catch_warnings(action="ignore"):
            total = _sum(gradients, dataset, batch)
    except UnsupportedModelError:
        raise  # says something about the model only
    except Exception:
        total = None
    if total is None:  # outside the handler, so that no cause is attached
        raise PrivateDataError(
            "the gradient step failed on this client's examples; the cause is withheld "
            "because it may quote them: call ClippedGradients on them locally to see it"
        )
    return _release(total, gradients.model, plan, randomness, weight_decay)


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


def _sum(
    gradients: ClippedGradients, dataset: Data, batch: npt.NDArray[np.int64]
) -> list[torch.Tensor]:
    tensors = _tensors(dataset)
    if tensors is None and len(batch):
        examples = cast(Dataset[Example], dataset)
        tensors = default_collate([examples[int(index)] for index in batch])
        batch = np.arange(len(batch))
    if tensors is None:
        empty = torch.empty(0)
        return gradients(empty, empty)
    chosen = torch.from_numpy(batch)
    inputs, targets = (t.index_select(0, chosen.to(t.device)) for t in tensors)
    return gradients(inputs, targets)


def _release(
    total: list[torch.Tensor],
    model: nn.Module,
    plan: PrivacyPlan,
    randomness: Randomness,
    weight_decay: float,
) -> Layers:
    """(1/b) total + noise, in float64 until the end (Alg. 1, line 3)."""
    released = np.concatenate([_flat(layer) for layer in total])
    for start in range(0, len(released), _BLOCK):
        block = released[start : start + _BLOCK]
        noisy = randomness.gaussian(len(block), plan.noise_std)
        noisy += block / np.float64(plan.batch_size)
        block[:] = noisy
    released = released.astype(np.float32, copy=False)
    layers, start = [], 0
    for layer in total:
        stop = start + layer.numel()
        layers.append(released[start:stop].reshape(layer.shape))
        start = stop
    if weight_decay:
        weights = (p for p in model.parameters() if p.requires_grad)
        for mine, weight in zip(layers, weights, strict=True):
            mine += weight_decay * _flat(weight).reshape(mine.shape)
    return layers


def _flat(tensor: torch.Tensor) -> npt.NDArray[np.floating]:
    """Return a view where the tensor is on the processor."""
    return tensor.detach().cpu().numpy().reshape(-1)
