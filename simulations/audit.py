"""Measure the privacy of the client's own code: ``python -m simulations.audit``.

An attacker who knows everything but one example looks at releases of the real code
path, `private_gradient`, on two adjacent datasets and tells them apart. How well that
works bounds epsilon from below (Jagielski, Ullman, Oprea, "Auditing Differentially
Private Machine Learning", NeurIPS 2020). A bound above the accounted epsilon is a bug.

``python -m simulations.audit --hostile`` is `safedshb audit`, with its options: a
search for weights and examples that break what the accounted epsilon rests on.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import beta
from torch import nn

from flwr_safedshb.cli import main as safedshb
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.plan import PrivacyPlan, PrivacyStatement
from flwr_safedshb.privacy.private_gradient import private_gradient
from flwr_safedshb.privacy.randomness.noise import (
    Randomness,
    SecureRandomness,
    SeededRandomness,
)
from simulations.command import (
    Parser,
    at_least,
    between,
    prepare_file,
    print_settings_errors,
)

Floats = npt.NDArray[np.float64]

# Raw gradients are this many times the clip, so that a missing clip shows.
_OVERSHOOT = 10.0
# Share of the releases that choose the attack; the others, unseen by it, measure it.
_CHOOSING = 0.25
_THRESHOLDS = 99
# With little noise and much sampling half the noise would exceed what is accounted.
PLANS = (
    PrivacyPlan(1.0, 1.0, 6, 8),
    PrivacyPlan(1.0, 1.0, 6, 8, clipping="ghost"),
    PrivacyPlan(1.0, 1.0, 6, 8, sampling="poisson"),
    PrivacyPlan(1.0, 0.5, 6, 8, sampling="poisson", adjacency="add-remove"),
)


@dataclass(frozen=True)
class AuditResult:
    """What was accounted for one release, and what an attacker measured.

    Attributes
    ----------
    plan : PrivacyPlan
    accounted : PrivacyStatement
        Upper bound, from the accountant.
    measured : float
        Lower bound on epsilon, wrong with probability at most 1 - ``confidence``.
    trials : int
        Releases looked at, on each of the two datasets.
    confidence : float
    """

    plan: PrivacyPlan
    accounted: PrivacyStatement
    measured: float
    trials: int
    confidence: float

    @property
    def holds(self) -> bool:
        """Whether the measurement leaves the accounted epsilon standing."""
        return self.measured <= self.accounted.epsilon


def audit(
    plan: PrivacyPlan,
    delta: float,
    trials: int,
    confidence: float,
    randomness: Randomness,
) -> AuditResult:
    """Attack ``trials`` releases of one step on each of two adjacent datasets."""
    without, with_canary = (
        _releases(plan, contributions, trials, randomness)
        for contributions in adjacent_contributions(plan)
    )
    return AuditResult(
        plan=plan,
        accounted=plan.statement(steps=1, delta=delta),
        measured=epsilon_lower_bound(without, with_canary, delta, confidence),
        trials=trials,
        confidence=confidence,
    )


def adjacent_contributions(plan: PrivacyPlan) -> tuple[Floats, Floats]:
    """Return the worst pair of datasets for the plan, as signed example gradients.

    Each entry is an example's gradient along one direction, in units of the clip. The
    pairs are those the accountant's dominating distributions belong to: with batches of
    fixed size the canary takes the place of an opposite example; under Poisson sampling
    the other examples stay silent, lest their number add noise. A removed example is
    one that has no gradient.

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
    with the datasets exchanged. The event, a half-line, is chosen on one part of the
    samples; Clopper-Pearson intervals on the other part bound both probabilities.

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
    event = _promising_event(without[:cut], with_canary[:cut], left, delta, confidence)
    counts = _counts(event, without[cut:], with_canary[cut:])
    return max(0.0, _bound(*counts, left, delta, confidence))


def _promising_event(
    without: Floats, with_canary: Floats, left: int, delta: float, confidence: float
) -> tuple[bool, float]:
    """Choose the half-line that should give the best bound on ``left`` releases."""
    scale = left / len(without)
    pooled = np.concatenate([without, with_canary])
    events = [
        (above, float(threshold))
        for threshold in np.quantile(pooled, np.linspace(0.01, 0.99, _THRESHOLDS))
        for above in (True, False)
    ]

    def prospect(event: tuple[bool, float]) -> float:
        hits, false_hits = _counts(event, without, with_canary)
        # One more false hit than was seen, lest an empty tail look better than it is.
        expected = min(scale * (false_hits + 1), left)
        return _bound(scale * hits, expected, left, delta, confidence)

    return max(events, key=prospect)


def _counts(
    event: tuple[bool, float], without: Floats, with_canary: Floats
) -> tuple[int, int]:
    """Count the event under the dataset that favours it, and under the other."""
    above, threshold = event
    if above:
        return int((with_canary > threshold).sum()), int((without > threshold).sum())
    return int((without <= threshold).sum()), int((with_canary <= threshold).sum())


def _bound(
    hits: float, false_hits: float, trials: int, delta: float, confidence: float
) -> float:
    # Either interval may fail with half of the probability that is left.
    error = (1 - confidence) / 2
    lower = beta.ppf(error, hits, trials - hits + 1) if hits else 0.0
    upper = (
        beta.ppf(1 - error, false_hits + 1, trials - false_hits)
        if false_hits < trials
        else 1.0
    )
    return math.log((lower - delta) / upper) if lower > delta else -math.inf


class _Canary(nn.Module):
    """An affine model of one input: a gradient has parts in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.affine = nn.Linear(1, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.affine(inputs)
        return output


def _linear_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs * targets).sum(dim=1)


def _releases(
    plan: PrivacyPlan, contributions: Floats, trials: int, randomness: Randomness
) -> Floats:
    """Run the client's code on a dataset with given gradients, many times.

    With inputs 1 the gradient of an example is its target in both parameters.

    Returns
    -------
    ndarray, shape (trials,)
        What is released along the direction of the canary's gradient.
    """
    size = _OVERSHOOT * plan.clip_norm
    targets = torch.tensor(contributions * size, dtype=torch.float32).unsqueeze(1)
    data = torch.ones_like(targets), targets
    gradients = ClippedGradients(_Canary(), _linear_loss, plan.clip_norm, plan.clipping)
    released = np.empty(trials)
    for trial in range(trials):
        layers = private_gradient(gradients, data, plan, randomness)
        released[trial] = sum(float(layer.sum()) for layer in layers) / math.sqrt(2)
    return released


def _table(results: Sequence[AuditResult]) -> Table:
    first = results[0]
    table = Table(
        title=(
            f"One private step: {first.trials} releases per dataset, "
            f"confidence {first.confidence:g}"
        )
    )
    table.add_column("mechanism")
    for column in ("noise\nmultiplier", "delta", "epsilon\nmeasured", "accounted"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for result in results:
        plan = result.plan
        table.add_row(
            f"{plan.sampling}, {plan.adjacency}, {plan.clipping}",
            f"{plan.noise_multiplier:g}",
            f"{result.accounted.delta:g}",
            f">= {result.measured:.3f}",
            f"<= {result.accounted.epsilon:.3f}",
            "holds" if result.holds else "[bold red]VIOLATED",
        )
    return table


@print_settings_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Audit every sampler and clipping path; 1 if a bound is violated, else 0."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if "--hostile" in given:
        given.remove("--hostile")
        return safedshb(["audit", *given])
    parser = Parser(prog="python -m simulations.audit")
    parser.add_argument(
        "--trials", type=at_least(100), default=10_000, help="per dataset"
    )
    parser.add_argument("--delta", type=between(0, 1), default=0.05)
    parser.add_argument("--confidence", type=between(0, 1), default=0.999)
    parser.add_argument("--seed", type=at_least(0), default=1)
    parser.add_argument(
        "--secure", action="store_true", help="the deployment's randomness, no seed"
    )
    parser.add_argument("--output", type=Path, default=Path("outputs/audit.json"))
    parser.add_argument(
        "--hostile", action="store_true", help="attack as `safedshb audit` does"
    )
    options = parser.parse_args(given)
    prepare_file(options.output)
    randomness = (
        SecureRandomness() if options.secure else SeededRandomness(options.seed)
    )
    results = [
        audit(plan, options.delta, options.trials, options.confidence, randomness)
        for plan in PLANS
    ]
    Console().print(_table(results))
    report = {
        "seed": None if options.secure else options.seed,
        "results": [{**asdict(result), "holds": result.holds} for result in results],
    }
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(result.holds for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
