"""One private gradient (Alg. 1, lines 4 to 6): the only function that touches data.

The client sends what this returns, through its momentum, and nothing else; and the
audit measures this very function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from flwr_safedshb.privacy.bad_examples import ignore_warnings
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.datasets import DrawnBatch, make_examples
from flwr_safedshb.privacy.losses import Loss
from flwr_safedshb.privacy.owners import OwnedExamples, PrivateData
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.randomness.noise import Randomness, round_to_grid

Vector = npt.NDArray[np.float32]
Layers = list[Vector]

# Coordinates that get their noise at a time: few, so that they stay in the cache and
# the noise takes little memory beside the model.
BLOCK = 2**16


@dataclass(frozen=True)
class BatchSource:
    """The examples that batches are drawn from, and how private a gradient of them is.

    Attributes
    ----------
    examples : Examples or OwnedExamples
        Of persons, if the plan's unit is the person.
    plan : PrivacyPlan
        ``num_examples`` must be the size of the dataset.
    randomness : Randomness
        Source of the batch and of the noise.
    """

    examples: PrivateData
    plan: PrivacyPlan
    randomness: Randomness


def private_gradient(
    gradients: ClippedGradients | tuple[nn.Module, Loss],
    dataset: object,
    plan: PrivacyPlan,
    randomness: Randomness,
    weight_decay: float = 0.0,
    like: tuple[object, object] | None = None,
) -> Layers:
    """Sample a batch, clip every example's gradient, average, add noise.

    See `private_vector`. A pair (model, loss) is prepared here, and the dataset is
    anything that `make_examples` takes, with `like` where it has items, or
    `OwnedExamples` for a plan whose unit is the person.

    Returns
    -------
    list of ndarray of float32
        One per trainable parameter, of its shape, in the order of
        ``model.parameters()``.
    """
    examples: PrivateData
    if isinstance(dataset, OwnedExamples):
        examples, per_owner = dataset, dataset.per_owner
    else:
        examples, per_owner = make_examples(dataset, like=like), 1
    if isinstance(gradients, tuple):
        model, loss = gradients
        terms = plan.clip_norm, plan.clipping, per_owner
        gradients = ClippedGradients(model, loss, *terms)
    gradients.prepare(*examples.like)
    vector = private_vector(
        gradients, BatchSource(examples, plan, randomness), weight_decay
    )
    weights = gradients.trained
    parts = torch.split(torch.from_numpy(vector), [w.numel() for w in weights])
    pairs = zip(parts, weights, strict=True)
    return [part.view(weight.shape).numpy() for part, weight in pairs]


def private_vector(
    gradients: ClippedGradients, source: BatchSource, weight_decay: float = 0.0
) -> Vector:
    """Sample a batch, clip every example's gradient, average, add noise.

    An example that cannot be read, or that the model or the loss cannot take,
    contributes zero: whatever the examples are, there is an answer.

    Parameters
    ----------
    gradients : ClippedGradients
        Prepared once for many steps; its clip must be the plan's.
    source : BatchSource
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
        As `ClippedGradients.prepare`, or if arguments do not fit each other; nothing
        that depends on the values of the examples.
    """
    batch = draw_batch(gradients, source)
    if batch is None:
        total = torch.zeros(gradients.size)
    else:
        with ignore_warnings():
            inputs, targets, usable = batch
            total = gradients.consume_batch((inputs, targets), usable=usable)[0]
    return add_noise(gradients, total, source, weight_decay)


def draw_batch(gradients: ClippedGradients, source: BatchSource) -> DrawnBatch | None:
    """Sample a batch: inputs, targets, and which of them count; None if empty."""
    examples, plan, randomness = source.examples, source.plan, source.randomness
    if gradients.clip_norm != plan.clip_norm:
        raise ValueError(
            f"the gradients are clipped at {gradients.clip_norm}, the plan says "
            f"clip_norm={plan.clip_norm}; they must be equal"
        )
    if examples.size != plan.num_examples:
        raise ValueError(
            f"num_examples={plan.num_examples} must be the size of the dataset, got "
            f"{examples.size}; make the plan for this dataset"
        )
    if isinstance(examples, OwnedExamples) != (plan.unit == "person"):
        raise ValueError(
            f"unit={plan.unit!r} of the plan does not fit the dataset; a plan for "
            "persons needs owners, and owners need unit='person'"
        )
    per_owner = examples.per_owner if isinstance(examples, OwnedExamples) else 1
    if gradients.per_owner != per_owner:
        raise ValueError(
            f"the gradients have per_owner={gradients.per_owner} and the dataset "
            f"{per_owner}; they must be equal"
        )
    if randomness.private:
        examples.refuse_undeclared()
    batch = plan.sampler.draw(plan, randomness)
    if not len(batch):
        return None
    # Seeded noise protects nobody, and need not pay for empty places.
    size = plan.sampler.padded_size(plan) if randomness.private else len(batch)
    chosen, taken = _pad_batch(batch, size, randomness)
    if isinstance(examples, OwnedExamples):
        return examples.read_batch(chosen, taken, randomness)
    return examples.read_batch(chosen, taken)


def _pad_batch(
    batch: npt.NDArray[np.int64], size: int, randomness: Randomness
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_] | None]:
    """Spread a batch over a multiple of `size` places; tell which are taken."""
    count = -(-len(batch) // size) * size
    if count == len(batch):
        return batch, None
    chosen, taken = np.full(count, batch[0]), np.zeros(count, bool)
    at = randomness.subset(count, len(batch))
    chosen[at], taken[at] = batch, True
    return chosen, taken


def add_noise(
    gradients: ClippedGradients,
    clipped_sum: torch.Tensor,
    source: BatchSource,
    weight_decay: float,
) -> Vector:
    """Return (1/b) sum + noise + decay, in float64 until the end (Alg. 1, line 6).

    Parameters
    ----------
    gradients : ClippedGradients
        Of the model that decays.
    clipped_sum : Tensor, shape (d,)
        Of the clipped gradients; it is overwritten.
    source, weight_decay
        See `private_vector`.
    """
    if not 0.0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay={weight_decay} must be at least 0 and finite")
    plan, randomness = source.plan, source.randomness
    total = clipped_sum.cpu().numpy()
    # Seeded noise protects nobody, and need not pay for the grid.
    needs_grid = randomness.private and plan.noise_std > 0
    for start in range(0, len(total), BLOCK):
        block = total[start : start + BLOCK]
        noisy = randomness.gaussian(len(block), plan.noise_std)
        noisy += block / np.float64(plan.batch_size)
        block[:] = round_to_grid(noisy, plan.noise_std) if needs_grid else noisy
    vector = total.astype(np.float32, copy=False)
    if weight_decay:
        vector += weight_decay * np.concatenate(
            [_to_flat_array(w) for w in gradients.trained]
        )
    return vector


def _to_flat_array(tensor: torch.Tensor) -> npt.NDArray[np.floating]:
    # numpy has no bfloat16.
    wide = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
    return wide.cpu().numpy().reshape(-1)
