"""The paper's drift lemma against its counterexample.

``python -m simulations.studies.drift``. Delta_t is the top eigenvalue of the covariance
of the h honest momentums. The lemma bounds it by a recursion, with Gcov^2 the largest
eigenvalue of the honest gradients' covariance, s the deviation of the noise in each of
d coordinates, and full batches:

E Delta_{t+1} <= beta E Delta_t + (1-beta) Gcov^2 + 2 (1-beta)^2 36 s^2 (1 + d/h).

(2 is the paper's factor before the noise.) Eight honest clients with the gradients
+-e_j in R^4, beta_0 = 0 and beta_1 = 1/2 break it for small s: see docs/convergence.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markdown import Markdown

from simulations.command import Parser, at_least, complaining
from simulations.results.summary import table

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


@dataclass(frozen=True)
class Sides:
    """Both sides of the lemma for E Delta_2, and the error of their difference."""

    left: float
    right: float
    error: float


def compare_sides(noise_std: float, draws: int, factor: float = FACTOR) -> Sides:
    """Measure both sides of the lemma on the counterexample.

    Parameters
    ----------
    noise_std : float
        s.
    draws : int
    factor : float
        What stands before the noise on the right.
    """
    h, d = CROSS.shape
    blocks = [
        draw_drifts(CROSS, [0.0, 0.5], noise_std, min(BLOCK, draws - done), seed)
        for seed, done in enumerate(range(0, draws, BLOCK))
    ]
    first, second = np.concatenate(blocks, axis=1)
    # Gcov^2 = 1/4 in every direction; beta = 1 - beta = 1/2.
    rest = 0.5 * 0.25 + factor * 0.25 * 36 * noise_std**2 * (1 + d / h)
    gaps = second - 0.5 * first - rest
    right = 0.5 * first.mean() + rest
    return Sides(float(second.mean()), float(right), float(gaps.std() / draws**0.5))


@complaining
def main(argv: Sequence[str] | None = None) -> int:
    """Print both sides for some noise; 1 if the lemma is not broken."""
    parser = Parser(prog="python -m simulations.studies.drift")
    parser.add_argument("--noises", type=float, nargs="+", default=[0.005, 0.002])
    parser.add_argument("--draws", type=at_least(1000), default=400_000)
    args = parser.parse_args(argv)
    found = {noise: compare_sides(noise, args.draws) for noise in args.noises}
    rows = [
        [f"{s:g}", f"{it.left:.5f}", f"{it.right:.5f}", f"{it.error:.6f}"]
        for s, it in found.items()
    ]
    heads = ["s", "E Delta_2", "at most, says the lemma", "standard error of the gap"]
    Console().print(Markdown("\n".join(table(heads, rows))))
    return 0 if all(it.left > it.right for it in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
