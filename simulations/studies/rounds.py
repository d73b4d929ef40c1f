"""The plan against measured rounds: ``python -m simulations.studies.rounds``.

`safedshb plan` bounds the mean squared error of SMEA's aggregate of momentums, and the
radius within which adversaries can turn a step uphill. Here honest momentums are made
step by step at a model that stays where it is, adversaries who know everything look for
the vectors that move the aggregate most, and the bound is held against what they reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from flwr_safedshb import theory
from flwr_safedshb.aggregation import SMEA
from simulations.command import Parser, at_least, complaining, prepare_file

Floats = NDArray[np.float64]

# Clients and adversaries; a third, a fifth and nearly a half of them.
FEDERATIONS = ((7, 3), (7, 2), (20, 9), (20, 4), (50, 10))
DIMENSIONS = (69, 1000)
# Noise of a step is 1, so figures are in its units.
MOMENTUM, STEPS = 0.99, 400
# How far shifted copies stand from what they copy, in units of a momentum's noise.
SHIFTS = tuple(float(shift) for shift in np.geomspace(0.1, 3.0, 10))
FACTOR = 4.0


@dataclass(frozen=True)
class Measured:
    """Predicted and measured figures of a federation."""

    n: int
    f: int
    d: int
    error_bound: float
    error: float
    radius_bound: float
    radius: float

    @property
    def factors(self) -> tuple[float, float]:
        """How many times what was measured the bounds are."""
        return self.error_bound / self.error, self.radius_bound / self.radius


def momentums(h: int, d: int, rng: np.random.Generator) -> Floats:
    """Return momentums, (h, d), of gradients that are noise alone."""
    found = np.zeros((h, d))
    for _ in range(STEPS):
        found = MOMENTUM * found + (1.0 - MOMENTUM) * rng.normal(size=(h, d))
    return found


def hostile(honest: Floats, f: int, along: Floats) -> Iterator[Floats]:
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


def worst(
    rule: SMEA,
    honest: Floats,
    f: int,
    along: Floats,
    harm: Callable[[NDArray[np.floating]], float],
) -> float:
    """Return the most harm that adversaries do."""
    return max(
        harm(rule(np.concatenate([honest, np.tile(sent, (f, 1))]), f))
        for sent in hostile(honest, f, along)
    )


def measure(n: int, f: int, d: int, draws: int, seed: int = 0) -> Measured:
    """Measure rounds of one federation."""
    # A search cut short is still a proven rule, and none is much better than 2000.
    rule, h = SMEA(max_nodes=2000), n - f
    errors, radii = [], []
    # The gradient points along the first axis; it is stopped where harm cancels it.
    gradient = np.eye(1, d)[0]
    for draw in range(draws):
        honest = momentums(h, d, np.random.default_rng([seed, n, f, d, draw]))
        centred = honest - honest.mean(axis=0)
        top = np.linalg.eigh(centred @ centred.T)[1][:, -1] @ centred
        top /= np.linalg.norm(top)
        errors.append(
            max(
                worst(rule, honest, f, side * top, lambda out: float(out @ out))
                for side in (1.0, -1.0)
            )
        )
        radii.append(
            worst(rule, honest, f, gradient, lambda out: -float(out @ gradient))
        )
    noise = theory.noise_in_momentum(1.0, MOMENTUM, STEPS)
    given = (n, f, d, noise, theory.kappa_smea(n, f))
    return Measured(
        n,
        f,
        d,
        theory.mean_estimation_bound(*given).combined,
        float(np.mean(errors)),
        theory.stopping_radius(*given),
        float(np.mean(radii)),
    )


def table(found: Sequence[Measured]) -> str:
    """Return bounds and measurements as a table."""
    lines = [
        "| n | f | d | error², bound | measured | factor | radius, bound | measured | "
        "factor |",
        "|---" * 9 + "|",
    ]
    for one in found:
        error, radius = one.factors
        figures = [one.error_bound, one.error, error]
        figures += [one.radius_bound, one.radius, radius]
        cells = [*map(str, (one.n, one.f, one.d)), *(f"{x:.3g}" for x in figures)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


@complaining
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all federations; 1 if a bound is broken or further than stated."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--draws", type=at_least(1), default=4, help="rounds of each federation"
    )
    smallest = min(n for n, _ in FEDERATIONS)
    parser.add_argument(
        "--largest", type=at_least(smallest), default=50, help="leave out larger n"
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/rounds.md"))
    options = parser.parse_args(arguments)
    prepare_file(options.out)
    federations = [
        (n, f, d) for n, f in FEDERATIONS if n <= options.largest for d in DIMENSIONS
    ]
    found = [
        measure(n, f, d, options.draws)
        for n, f, d in track(federations, "measuring rounds")
    ]
    factors = [factor for one in found for factor in one.factors]
    text = table(found)
    options.out.write_text(text)
    print(text)
    print(
        f"The plan's bounds are {min(factors):.3g} to {max(factors):.3g} times what "
        f"was measured; within {FACTOR:g} is stated. Written: {options.out}"
    )
    return 0 if min(factors) >= 1.0 and max(factors) <= FACTOR else 1


if __name__ == "__main__":
    raise SystemExit(main())
