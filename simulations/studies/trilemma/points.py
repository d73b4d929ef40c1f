"""One setting of mean estimation, and the error of a rule under an attack in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.aggregation import (
    SMEA,
    Average,
    Filter,
    GeometricMedian,
    Median,
    Rule,
    TrimmedMean,
)
from flwr_safedshb.attacks import (
    ALIE,
    FOE,
    Attack,
    FarCluster,
    Gaussian,
    HugeNorm,
    Mimic,
    MinMax,
    MinSum,
    SignFlip,
    Zero,
)

Floats = NDArray[np.float64]

# Searches for SMEA's subset end after so many nodes: exact up to n = 40 here, and cut
# short with a certificate beyond.
MAX_NODES = 2000
RULES: dict[str, Rule] = {
    "average": Average(),
    "SMEA": SMEA(max_nodes=MAX_NODES),
    "Filter": Filter(),
    "median": Median(),
    "trimmed mean": TrimmedMean(),
    "geometric median": GeometricMedian(),
}
# All but those that screening stops (NaN) and those on labels, which there are none of.
ATTACKS: dict[str, Attack] = {
    "ALIE": ALIE(),
    "FOE": FOE(),
    "sign flip": SignFlip(),
    "mimic": Mimic(),
    "min-max": MinMax(),
    "min-sum": MinSum(),
    "far cluster": FarCluster(),
    "zero": Zero(),
    "Gaussian": Gaussian(),
    # Its default, 1e30, is meant for servers that overflow: beside it, the rounding of
    # inner products decides and not the rule.
    "huge norm": HugeNorm(norm=1e6),
}
NO_ATTACK = "none"
# Norm of the honest mean: far from the edge of the ball, and no attack's own zero.
MEAN_NORM = 0.5


@dataclass(frozen=True)
class Point:
    """A setting; symbols are the paper's.

    Attributes
    ----------
    n, f, d, m : int
        Clients, adversaries among them, dimension, examples of each client.
    epsilon : float
        What each honest client's release is calibrated to.
    heterogeneity : float
        G: root mean square distance of the honest clients' means from their own mean,
        all of it along one direction, where it harms most.
    noise_std : float
        sigma_DP of that release.
    """

    n: int
    f: int
    d: int
    m: int
    epsilon: float
    heterogeneity: float
    noise_std: float

    @property
    def privacy_only(self) -> float:
        """D sigma_DP^2/(n-f), the error of the honest clients' noise alone."""
        return self.d * self.noise_std**2 / (self.n - self.f)


def honest_vectors(point: Point, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Draw what honest clients send; return it, (n-f, d), and their true mean, (d,).

    All m points of a client are in its only batch and none is clipped, so that it sends
    its own mean plus noise: its m points need not be drawn one by one.
    """
    h, d = point.n - point.f, point.d
    # A corner of the cube that the lower bound takes its examples from, and the
    # direction along which ALIE looks.
    corner = np.full(d, 1.0 / np.sqrt(d))
    mean = MEAN_NORM * corner
    means = np.tile(mean, (h, 1))
    if point.heterogeneity > 0.0:
        along = rng.normal(size=h)
        along -= along.mean()
        along *= point.heterogeneity / along.std()
        means += along[:, None] * corner
    return means + point.noise_std * rng.normal(size=(h, d)), mean


def errors(point: Point, rule: str, seeds: Sequence[int]) -> dict[str, list[float]]:
    """Return the squared errors of a rule under each attack, one for each seed.

    The honest vectors of a seed are the same for every rule and attack.
    """
    found: dict[str, list[float]] = {}
    aggregate = RULES[rule]
    for seed in seeds:
        rng = np.random.default_rng([seed, *_key(point)])
        honest, mean = honest_vectors(point, rng)
        for name, attack in (ATTACKS if point.f else {NO_ATTACK: None}).items():
            sent = honest
            if attack is not None:
                hostile = attack(honest, point.f, rng, aggregate)
                sent = np.concatenate((honest, hostile))
            error = np.square(aggregate(sent, point.f) - mean).sum()
            found.setdefault(name, []).append(float(error))
    return found


def _key(point: Point) -> tuple[int, ...]:
    """Return numbers that make the draws of two points independent."""
    numbers = (point.n, point.f, point.d, point.m)
    reals = (point.epsilon, point.heterogeneity)
    return (*numbers, *(round(1e6 * number) for number in reals))
