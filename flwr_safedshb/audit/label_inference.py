"""Try to infer one example's label from the noisy gradient that a client releases.

The attacker is the server. It chose the weights and knows all examples and labels,
except one label, which is one of two. No real server knows that much. It computes the
releases without noise for both labels, and guesses the label whose release is nearer:
with Gaussian noise this is the most powerful test.
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
# The probability that a correct mechanism is called broken.
_FALSE_ALARM = 1e-6


@dataclass(frozen=True)
class LabelGuesses:
    """How often an attack guessed right.

    Attributes
    ----------
    num_right, num_guesses : int
    chance : float
        The largest probability of a right guess that the plan allows, slightly above
        one half.
    """

    num_right: int
    num_guesses: int
    chance: float

    @property
    def holds(self) -> bool:
        """Whether the number of right guesses is plausible under the plan's privacy."""
        tail = binom.sf(self.num_right - 1, self.num_guesses, self.chance)
        return bool(tail > _FALSE_ALARM)


def infer_labels(
    target: TargetModel, candidates: Sequence[Candidate], guesses: int, seed: int
) -> LabelGuesses:
    """Guess labels with the candidate whose two labels differ most in their releases.

    Parameters
    ----------
    target : TargetModel
        One that `ClippedGradients` accepts.
    candidates : sequence of Candidate
        Weights and examples to choose from, such as the worst ones of a search.
    guesses : int
    seed : int
        Seeds the labels and the noise.
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
    # One step on a full batch: two Gaussians whose means are at most 1 / s deviations
    # apart.
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
        """Release `label` with noise, and return the label whose mean is nearer."""
        released = self._release(label, self._plan, source)
        distances = [float(np.linalg.norm(released - mean)) for mean in self._means]
        return int(distances[1] < distances[0])

    def _release(
        self, label: int, plan: PrivacyPlan, source: SeededRandomness
    ) -> npt.NDArray[np.float64]:
        load_entries(self._gradients.model, self._weights)
        # This attacker knows the dropout mask.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            batch = BatchSource(self._batches[label], plan, source)
            vector = private_vector(self._gradients, batch)
        return vector.astype(np.float64)
