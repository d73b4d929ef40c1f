"""Tries to read one example's label out of what a client releases.

The attacker is the server: it chose the weights, and knows every example and the label
of every example but one, of which it knows that it is one of two. That is more than any
server knows. It computes, without noise, what the two labels would have released, and
says which of them the release is nearer to: with Gaussian noise no test is better.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import binom, norm

from flwr_safedshb.audit.candidate import Trial, entries, typed
from flwr_safedshb.audit.target_model import Batch, Subject
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.datasets import ArrayExamples
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.private_gradient import BatchSource, private_vector
from flwr_safedshb.privacy.randomness.noise import SeededRandomness

CLIP_NORM = 1.0
NOISE_MULTIPLIER = 10.0
# A true mechanism is called broken once in so many audits.
_FALSE_ALARM = 1e-6


@dataclass(frozen=True)
class Reading:
    """How often an attack was right.

    Attributes
    ----------
    subject : str
    right, guesses : int
    chance : float
        The largest probability of a right guess that the plan allows: little above one
        half.
    """

    subject: str
    right: int
    guesses: int
    chance: float

    @property
    def holds(self) -> bool:
        """Whether so many right guesses are no surprise under the plan's privacy."""
        return bool(binom.sf(self.right - 1, self.guesses, self.chance) > _FALSE_ALARM)

    def to_dict(self) -> dict[str, object]:
        """Return the fields and the verdict."""
        return {**asdict(self), "holds": self.holds}


def read_labels(
    subject: Subject, trials: Sequence[Trial], guesses: int, seed: int
) -> Reading:
    """Guess labels with the weights that tell the two apart best.

    Parameters
    ----------
    subject : Subject
        One that `ClippedGradients` accepts.
    trials : sequence of Trial
        Weights and examples to choose from, such as the worst ones of a search.
    guesses : int
    seed : int
        Of the labels and of the noise.
    """
    model = subject.make().to(trials[0].weights[0].dtype)
    gradients = ClippedGradients(model, subject.loss, CLIP_NORM)
    rng = np.random.default_rng(seed)
    with warnings.catch_warnings(action="ignore"):
        gradients(*typed(subject.draw(3, rng), trials[0].weights[0].dtype))
        found = max(
            (_Target(gradients, *_relabelled(subject, trial, rng)) for trial in trials),
            key=lambda target: target.distance,
        )
        right = 0
        for guess in range(guesses):
            label = int(rng.integers(2))
            source = SeededRandomness(seed).for_step(0, guess)
            right += found.guess(label, source) == label
    # One step of a batch of all examples: two Gaussians, 1 / s apart at most.
    chance = float(norm.cdf(0.5 / NOISE_MULTIPLIER))
    return Reading(subject.name, right, guesses, chance)


def _relabelled(
    subject: Subject, trial: Trial, rng: np.random.Generator
) -> tuple[list[torch.Tensor], tuple[Batch, Batch]]:
    """Return the weights, and the batch with two labels for its first example."""
    inputs, targets = trial.first
    for _ in range(20):
        other = subject.draw(1, rng)[1].to(targets.dtype)
        if not torch.equal(other, targets[:1]):
            break
    changed = torch.cat([other, targets[1:]])
    return trial.weights, ((inputs, targets), (inputs, changed))


class _Target:
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
        quiet = replace(self._plan, noise_multiplier=0.0)
        self._means = [
            self._released(label, quiet, SeededRandomness(0)) for label in (0, 1)
        ]
        gap = self._means[1] - self._means[0]
        self.distance = float(np.linalg.norm(gap)) if np.isfinite(gap).all() else 0.0

    def guess(self, label: int, source: SeededRandomness) -> int:
        """Return which label a release with noise looks like."""
        released = self._released(label, self._plan, source)
        far = [float(np.linalg.norm(released - mean)) for mean in self._means]
        return int(far[1] < far[0])

    def _released(
        self, label: int, plan: PrivacyPlan, source: SeededRandomness
    ) -> npt.NDArray[np.float64]:
        for entry, given in zip(
            entries(self._gradients.model), self._weights, strict=True
        ):
            entry.copy_(given)
        # Dropout is no secret to this attacker.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            draw = BatchSource(self._batches[label], plan, source)
            vector = private_vector(self._gradients, draw)
        return vector.astype(np.float64)
