"""Try to read one example's label from what a client releases.

The attacker is the server: it chose the weights, and knows every example and the label
of every example but one, which is one of two. That is more than any server knows. It
computes, without noise, what the two labels would have released, and guesses the one
that the release is nearer to: with Gaussian noise no test is better.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import binom, norm

from flwr_safedshb.audit.candidate import Candidate, cast_batch, load_entries
from flwr_safedshb.audit.target_model import Batch, TargetModel
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.datasets import ArrayExamples
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.private_gradient import BatchSource, private_vector
from flwr_safedshb.privacy.randomness.noise import SeededRandomness

CLIP_NORM = 1.0
NOISE_MULTIPLIER = 10.0
# The probability with which a correct mechanism is called broken.
_FALSE_ALARM = 1e-6


@dataclass(frozen=True)
class LabelGuesses:
    """How often an attack was right.

    Attributes
    ----------
    right, guesses : int
    chance : float
        The largest probability of a right guess that the plan allows: little above one
        half.
    """

    right: int
    guesses: int
    chance: float

    @property
    def holds(self) -> bool:
        """Whether so many right guesses are no surprise under the plan's privacy."""
        return bool(binom.sf(self.right - 1, self.guesses, self.chance) > _FALSE_ALARM)


def infer_labels(
    target: TargetModel, candidates: Sequence[Candidate], guesses: int, seed: int
) -> LabelGuesses:
    """Guess labels with the weights that tell the two apart best.

    Parameters
    ----------
    target : TargetModel
        One that `ClippedGradients` accepts.
    candidates : sequence of Candidate
        Weights and examples to choose from, such as the worst ones of a search.
    guesses : int
    seed : int
        Of the labels and of the noise.
    """
    dtype = candidates[0].weights[0].dtype
    model = target.make().to(dtype)
    gradients = ClippedGradients(model, target.loss, CLIP_NORM)
    rng = np.random.default_rng(seed)
    with warnings.catch_warnings(action="ignore"):
        gradients(*cast_batch(target.draw(3, rng), dtype))
        attacks = (
            _LabelAttack(gradients, candidate.weights, _relabel(target, candidate, rng))
            for candidate in candidates
        )
        best = max(attacks, key=lambda attack: attack.distance)
        right = 0
        for guess in range(guesses):
            label = int(rng.integers(2))
            source = SeededRandomness(seed).for_step(0, guess)
            right += best.guess(label, source) == label
    # One step of a batch of all examples: two Gaussians, 1 / s apart at most.
    chance = float(norm.cdf(0.5 / NOISE_MULTIPLIER))
    return LabelGuesses(right, guesses, chance)


def _relabel(
    target: TargetModel, candidate: Candidate, rng: np.random.Generator
) -> tuple[Batch, Batch]:
    """Return the first batch with two labels for its first example."""
    inputs, targets = candidate.first_batch
    for _ in range(20):
        other = target.draw(1, rng)[1].to(targets.dtype)
        if not torch.equal(other, targets[:1]):
            break
    return (inputs, targets), (inputs, torch.cat([other, targets[1:]]))


class _LabelAttack:
    """Two datasets that differ in a label, under weights of the server."""

    def __init__(
        self,
        gradients: ClippedGradients,
        weights: list[torch.Tensor],
        batches: tuple[Batch, Batch],
    ) -> None:
        self._gradients, self._weights = gradients, weights
        self._batches = [ArrayExamples(*batch) for batch in batches]
        count = len(batches[0][1])
        self._plan = PrivacyPlan(CLIP_NORM, NOISE_MULTIPLIER, count, count)
        noiseless = replace(self._plan, noise_multiplier=0.0)
        self._means = [
            self._release(label, noiseless, SeededRandomness(0)) for label in (0, 1)
        ]
        gap = self._means[1] - self._means[0]
        self.distance = float(np.linalg.norm(gap)) if np.isfinite(gap).all() else 0.0

    def guess(self, label: int, source: SeededRandomness) -> int:
        """Return which label a noisy release of `label` looks like."""
        released = self._release(label, self._plan, source)
        far = [float(np.linalg.norm(released - mean)) for mean in self._means]
        return int(far[1] < far[0])

    def _release(
        self, label: int, plan: PrivacyPlan, source: SeededRandomness
    ) -> npt.NDArray[np.float64]:
        load_entries(self._gradients.model, self._weights)
        # Dropout is no secret to this attacker.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            batch = BatchSource(self._batches[label], plan, source)
            vector = private_vector(self._gradients, batch)
        return vector.astype(np.float64)
