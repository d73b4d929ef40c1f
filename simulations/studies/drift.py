"""The paper's drift lemma against its counterexample: ``-m simulations.study drift``.

Delta_t is the top eigenvalue of the covariance of the h honest momentums. The lemma
bounds it by a recursion, with Gcov^2 the largest eigenvalue of the honest gradients'
covariance, s the deviation of the noise in each of d coordinates, and full batches:

E Delta_{t+1} <= beta E Delta_t + (1-beta) Gcov^2 + 2 (1-beta)^2 36 s^2 (1 + d/h).

(2 is the paper's factor before the noise.) Eight honest clients with the gradients
+-e_j in R^4, beta_0 = 0 and beta_1 = 1/2 break it for small s: see docs/convergence.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulations.results.tables import Table
from simulations.study import Runs, Section, Study, grid

Floats = NDArray[np.float64]

CROSS: Floats = np.concatenate([np.eye(4), -np.eye(4)])
BLOCK = 20_000
FACTOR = 2.0  # the paper's


def draw_drifts(
    gradients: Floats, betas: Sequence[float], noise_std: float, draws: int, seed: int
) -> Floats:
    """Return Delta_1, Delta_2, .. of momentums of noisy gradients, (steps, draws).

    Parameters
    ----------
    gradients : ndarray of shape (h, d)
        Of the honest clients, the same in every step.
    betas : sequence of float
        Coefficients of the old momentum.
    noise_std : float
    draws, seed : int
    """
    rng = np.random.default_rng(seed)
    momentums, found = np.zeros((draws, *gradients.shape)), []
    for beta in betas:
        drawn = gradients + noise_std * rng.normal(size=momentums.shape)
        momentums = beta * momentums + (1 - beta) * drawn
        centred = momentums - momentums.mean(axis=1, keepdims=True)
        covariance = np.swapaxes(centred, 1, 2) @ centred / len(gradients)
        found.append(np.linalg.eigvalsh(covariance)[:, -1])
    return np.array(found)


def compare_sides(
    noise_std: float, draws: int = 400_000, factor: float = FACTOR, seed: int = 0
) -> dict[str, float]:
    """Return both sides of the lemma for E Delta_2, and the error of their difference.

    Parameters
    ----------
    noise_std : float
        s.
    draws : int
    factor : float
        What stands before the noise on the right.
    seed : int
        Of the first block of draws.
    """
    h, d = CROSS.shape
    blocks = [
        draw_drifts(
            CROSS, [0.0, 0.5], noise_std, min(BLOCK, draws - done), seed + block
        )
        for block, done in enumerate(range(0, draws, BLOCK))
    ]
    first, second = np.concatenate(blocks, axis=1)
    # Gcov^2 = 1/4 in every direction; beta = 1 - beta = 1/2.
    rest = 0.5 * 0.25 + factor * 0.25 * 36 * noise_std**2 * (1 + d / h)
    gaps = second - 0.5 * first - rest
    return {
        "left": float(second.mean()),
        "right": float(0.5 * first.mean() + rest),
        "error": float(gaps.std() / draws**0.5),
    }


def report(runs: Runs[Any]) -> Iterator[Section]:
    """Yield both sides for each noise."""
    rows = [
        [f"{float(case.labels['noise_std']):g}"]
        + [f"{run['metrics'][key]:.5f}" for key in ("left", "right")]
        + [f"{run['metrics']['error']:.6f}"]
        for case, run in runs.items()
    ]
    heads = ["s", "E Delta_2", "at most, says the lemma", "standard error of the gap"]
    yield Section("Both sides of the lemma", table=Table(heads, rows))


def is_not_broken(runs: Runs[Any]) -> bool:
    """Return True if the lemma holds for some noise."""
    return any(
        run["metrics"]["left"] <= run["metrics"]["right"] for run in runs.values()
    )


study = Study(
    "drift",
    "The paper's drift lemma against its counterexample",
    "Is the drift of honest momentums ever above the paper's bound?",
    grid(noise_std=(0.005, 0.002)),
    seeds=(0,),
    report=report,
    measure=compare_sides,
    failed=is_not_broken,
)
