"""Bound epsilon from below with an attack that tells neighbouring datasets apart.

The attacker knows everything except one example, the canary. It sees releases of the
real code, `private_gradient`, on two neighbouring datasets. Its success in telling them
apart bounds epsilon from below (Jagielski, Ullman, Oprea, "Auditing Differentially
Private Machine Learning", NeurIPS 2020). A bound above the accounted epsilon is a bug.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import beta
from torch import nn

from flwr_safedshb.audit.target_model import ComposedModel
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.owners import make_owned_examples
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.private_gradient import private_gradient
from flwr_safedshb.privacy.randomness.noise import Randomness

Floats = npt.NDArray[np.float64]

# Raw gradients are this many times the clip norm, so that a missing clip shows.
_OVERSHOOT = 10.0
# The share of the releases that is used to choose the event; the rest measures it.
_CHOOSING = 0.25
_THRESHOLDS = 99
# So little noise and so large batches that a mechanism with half the noise would exceed
# the accounted epsilon.
PLANS = (
    PrivacyPlan(1.0, 1.0, 6, 8),
    PrivacyPlan(1.0, 1.0, 6, 8, clipping="ghost"),
    PrivacyPlan(1.0, 1.0, 6, 8, sampling="poisson"),
    PrivacyPlan(1.0, 0.5, 6, 8, sampling="poisson", adjacency="add-remove"),
    PrivacyPlan(1.0, 1.0, 6, 8, unit="person"),
)
# Examples of each person, and of the canary in the dataset with it; and K.
_EXAMPLES, _CANARY_EXAMPLES, _PLACES = 2, 7, 3


def measure_epsilon(
    plan: PrivacyPlan,
    delta: float,
    trials: int,
    confidence: float,
    randomness: Randomness,
    progress: Callable[[int], object] = lambda count: None,
) -> float:
    """Return a lower bound on epsilon from releases of one step.

    `trials` releases are attacked on each of two neighbouring datasets. The accounted
    epsilon must be at least the bound, which has the given confidence.
    """
    without, with_canary = (
        _release_vectors(plan, contributions, trials, randomness, progress)
        for contributions in neighbouring_contributions(plan)
    )
    return epsilon_lower_bound(without, with_canary, delta, confidence)


def neighbouring_contributions(plan: PrivacyPlan) -> tuple[Floats, Floats]:
    """Return the worst neighbouring datasets for the plan, as signed gradients.

    Each entry is an example's gradient along one direction, in units of the clip norm.
    They attain the accountant's dominating pair. With batches of fixed size the canary
    replaces an example with the opposite gradient. Under Poisson sampling the other
    examples have gradient zero, because their random number would add noise. A removed
    example is one with gradient zero.

    Returns
    -------
    (ndarray, ndarray)
        Both of shape (m,); they differ in the first entry, the canary.
    """
    absent = 0.0 if plan.adjacency == "add-remove" else -1.0
    without = np.full(plan.num_examples, plan.sampler.canary_background)
    without[0] = absent
    with_canary = without.copy()
    with_canary[0] = 1.0
    return without, with_canary


def epsilon_lower_bound(
    without: Floats, with_canary: Floats, delta: float, confidence: float
) -> float:
    """Bound epsilon from below by the best threshold between two samples.

    (epsilon, delta)-privacy means P(E) <= e^epsilon Q(E) + delta for every event E, and
    the same with P and Q exchanged. The event, a half-line, is chosen on one part of
    the samples; Clopper-Pearson intervals on the rest bound both probabilities.

    Parameters
    ----------
    without, with_canary : ndarray, shape (trials,)
        Releases along the canary's direction, in the order in which they were made.
    delta : float
    confidence : float
        Of the returned bound.
    """
    cut = int(_CHOOSING * len(without))
    left = len(without) - cut
    event = _choose_event(without[:cut], with_canary[:cut], left, delta, confidence)
    counts = _count_event(event, without[cut:], with_canary[cut:])
    return max(0.0, _bound_epsilon(*counts, left, delta, confidence))


def _choose_event(
    without: Floats, with_canary: Floats, left: int, delta: float, confidence: float
) -> tuple[bool, float]:
    """Choose the half-line that should give the best bound on `left` releases."""
    scale = left / len(without)
    pooled = np.concatenate([without, with_canary])
    events = [
        (above, float(threshold))
        for threshold in np.quantile(pooled, np.linspace(0.01, 0.99, _THRESHOLDS))
        for above in (True, False)
    ]

    def predict_bound(event: tuple[bool, float]) -> float:
        hits, false_hits = _count_event(event, without, with_canary)
        # One more false hit than was seen, so that an empty tail is not overrated.
        expected = min(scale * (false_hits + 1), left)
        return _bound_epsilon(scale * hits, expected, left, delta, confidence)

    return max(events, key=predict_bound)


def _count_event(
    event: tuple[bool, float], without: Floats, with_canary: Floats
) -> tuple[int, int]:
    """Count the event under the dataset that favours it, and under the other."""
    above, threshold = event
    if above:
        return int((with_canary > threshold).sum()), int((without > threshold).sum())
    return int((without <= threshold).sum()), int((with_canary <= threshold).sum())


def _bound_epsilon(
    hits: float, false_hits: float, trials: int, delta: float, confidence: float
) -> float:
    # Each interval fails with at most half of 1 - confidence.
    error = (1 - confidence) / 2
    lower = beta.ppf(error, hits, trials - hits + 1) if hits else 0.0
    upper = (
        beta.ppf(1 - error, false_hits + 1, trials - false_hits)
        if false_hits < trials
        else 1.0
    )
    return math.log((lower - delta) / upper) if lower > delta else -math.inf


def _release_vectors(
    plan: PrivacyPlan,
    contributions: Floats,
    trials: int,
    randomness: Randomness,
    progress: Callable[[int], object],
) -> Floats:
    """Release private gradients of a dataset with the given contributions, many times.

    The model is affine in one input, so that a gradient has parts in two tensors. With
    inputs 1 and a linear loss, an example's gradient is its target in both.

    Returns
    -------
    ndarray, shape (trials,)
        What is released along the direction of the canary's gradient.
    """
    data, per_owner = _make_data(plan, _OVERSHOOT * plan.clip_norm * contributions)
    model = ComposedModel(lambda model, x: model.affine(x), affine=nn.Linear(1, 1))
    terms = plan.clip_norm, plan.clipping, per_owner
    gradients = ClippedGradients(model, _linear_loss, *terms)
    released = np.empty(trials)
    for trial in range(trials):
        layers = private_gradient(gradients, data, plan, randomness)
        released[trial] = sum(float(layer.sum()) for layer in layers) / math.sqrt(2)
        progress(1)
    return released


def _make_data(plan: PrivacyPlan, values: Floats) -> tuple[object, int]:
    """Return a dataset whose examples, or persons, have these targets; and K."""
    owners = np.arange(len(values))
    if plan.unit == "person":
        counts = np.full(len(values), _EXAMPLES)
        counts[0] = _CANARY_EXAMPLES if values[0] > 0 else _EXAMPLES
        owners = np.repeat(owners, counts)
    targets = torch.tensor(values[owners], dtype=torch.float32).unsqueeze(1)
    data = torch.ones_like(targets), targets
    if plan.unit == "example":
        return data, 1
    return make_owned_examples(data, owners, _PLACES), _PLACES


def _linear_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs * targets).sum(dim=1)
