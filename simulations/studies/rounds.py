"""The plan against measured rounds: ``python -m simulations.study rounds``.

`safedshb plan` bounds the mean squared error of SMEA's aggregate of momentums, and the
radius within which adversaries can turn a step uphill. Here honest momentums are made
step by step at a model that stays where it is, adversaries who know everything look for
the vectors that move the aggregate most, and the bound is held against what they reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb import theory
from flwr_safedshb.aggregation import SMEA
from simulations.results.tables import Table
from simulations.study import Runs, Section, Study, grid

Floats = NDArray[np.float64]

# Clients and adversaries; a third, a fifth and nearly a half of them.
FEDERATIONS = ((7, 3), (7, 2), (20, 9), (20, 4), (50, 10))
DIMENSIONS = (69, 1000)
# Noise of a step is 1, so figures are in its units.
MOMENTUM, STEPS = 0.99, 400
# How far shifted copies stand from what they copy, in units of a momentum's noise.
SHIFTS = tuple(float(shift) for shift in np.geomspace(0.1, 3.0, 10))
FACTOR = 4.0


def draw_momentums(h: int, d: int, rng: np.random.Generator) -> Floats:
    """Return momentums, (h, d), of gradients that are noise alone."""
    found = np.zeros((h, d))
    for _ in range(STEPS):
        found = MOMENTUM * found + (1.0 - MOMENTUM) * rng.normal(size=(h, d))
    return found


def propose_attacks(honest: Floats, f: int, along: Floats) -> Iterator[Floats]:
    """Yield vectors for all adversaries to send: shifted copies of honest ones.

    They copy the honest mean, one honest client or a few that lie together on one side,
    and shift it further: against `along`, or away from the honest mean.
    """
    order = np.argsort(honest @ along)
    keep = len(honest) - f
    groups = [order, *(order[i : i + 1] for i in range(3))]
    groups += [order[:k] for k in sorted({2, 3, max(1, keep // 2), keep})]
    mean, size = honest.mean(axis=0), float(np.linalg.norm(honest, axis=1).mean())
    for group in groups:
        anchor = honest[group].mean(axis=0)
        away = anchor - mean
        ways = [-along]
        if np.linalg.norm(away) > 1e-9 * size:
            ways.append(away / np.linalg.norm(away))
        for way in ways:
            for shift in SHIFTS:
                yield anchor + shift * size * way


def find_worst(
    rule: SMEA,
    honest: Floats,
    f: int,
    along: Floats,
    harm: Callable[[NDArray[np.floating]], float],
) -> float:
    """Return the most harm that adversaries do."""
    return max(
        harm(rule(np.concatenate([honest, np.tile(sent, (f, 1))]), f))
        for sent in propose_attacks(honest, f, along)
    )


def measure(n: int, f: int, d: int, draws: int = 4, seed: int = 0) -> dict[str, float]:
    """Return predicted and measured figures of rounds of one federation."""
    # A search cut short is still a proven rule, and none is much better than 2000.
    rule, h = SMEA(max_nodes=2000), n - f
    errors, radii = [], []
    # The gradient points along the first axis; it is stopped where harm cancels it.
    gradient = np.eye(1, d)[0]
    for draw in range(draws):
        honest = draw_momentums(h, d, np.random.default_rng([seed, n, f, d, draw]))
        centred = honest - honest.mean(axis=0)
        top = np.linalg.eigh(centred @ centred.T)[1][:, -1] @ centred
        top /= np.linalg.norm(top)
        errors.append(
            max(
                find_worst(rule, honest, f, side * top, lambda out: float(out @ out))
                for side in (1.0, -1.0)
            )
        )
        radii.append(
            find_worst(rule, honest, f, gradient, lambda out: -float(out @ gradient))
        )
    noise = theory.noise_in_momentum(1.0, MOMENTUM, STEPS)
    given = (n, f, d, noise, theory.kappa_smea(n, f))
    error_bound = theory.mean_estimation_bound(*given).combined
    radius_bound, error = theory.stopping_radius(*given), float(np.mean(errors))
    radius = float(np.mean(radii))
    return {
        "error_bound": error_bound,
        "error": error,
        "error_factor": error_bound / error,
        "radius_bound": radius_bound,
        "radius": radius,
        "radius_factor": radius_bound / radius,
    }


def factors(runs: Runs[Any]) -> list[float]:
    """Return how many times what was measured the bounds are."""
    return [
        run["metrics"][f"{name}_factor"]
        for run in runs.values()
        for name in ("error", "radius")
    ]


def report(runs: Runs[Any]) -> Iterator[Section]:
    """Yield bounds and measurements."""
    rows = [
        [*case.labels["federation"].split(" of "), case.labels["d"]]
        + [f"{value:.3g}" for value in run["metrics"].values()]
        for case, run in runs.items()
    ]
    heads = ["f", "n", "d", "error², bound", "measured", "factor", "radius, bound"]
    found = factors(runs)
    yield Section(
        "The plan's bounds and measured rounds",
        table=Table([*heads, "measured", "factor"], rows),
        notes=f"The plan's bounds are {min(found):.3g} to {max(found):.3g} times what "
        f"was measured; within {FACTOR:g} is stated.",
    )


def is_outside(runs: Runs[Any]) -> bool:
    """Return True if a bound is broken, or farther away than stated."""
    return min(factors(runs)) < 1.0 or max(factors(runs)) > FACTOR


study = Study(
    "rounds",
    "The plan against measured rounds",
    "How far above what adversaries reach are the plan's bounds?",
    grid(
        federation={f"{f} of {n}": f"n={n} f={f}" for n, f in FEDERATIONS},
        d=DIMENSIONS,
    ),
    seeds=(0,),
    report=report,
    measure=measure,
    failed=is_outside,
)
