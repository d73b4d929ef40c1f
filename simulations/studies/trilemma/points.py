"""One setting of mean estimation, and the error of a rule under an attack in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
# From honest vectors to f hostile ones; an `Attack` is one.
AttackFunction = Callable[
    [Floats, int, np.random.Generator, Rule], NDArray[np.floating]
]

# How far shifted copies stand from what they copy, in lengths of what it is off by.
SHIFTS = tuple(float(shift) for shift in np.geomspace(0.3, 3.0, 6))

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


def shifted_copies(
    honest: Floats, f: int, rng: np.random.Generator, aggregate: Rule
) -> Floats:
    """Copy what lies on one side of the honest, and shift it as far as the rule bears.

    The attacks that shift the honest mean use little of what kappa allows. These
    colluders copy one honest client, or the mean of n - 2f of them, along the direction
    in which the honest differ most, and search for the shift that does most harm.
    """
    mean = honest.mean(axis=0)
    centred = honest - mean
    top = np.linalg.eigh(centred @ centred.T)[1][:, -1] @ centred
    order = np.argsort(centred @ top)
    best, worst = -1.0, np.zeros((f, honest.shape[1]))
    for group in (order[:1], order[: max(1, len(honest) - f)]):
        away = centred[group].mean(axis=0)
        for shift in SHIFTS:
            sent = np.tile(mean + (1.0 + shift) * away, (f, 1))
            out = aggregate(np.concatenate((honest, sent)), f)
            harm = float(np.square(out - mean).sum())
            if harm > best:
                best, worst = harm, sent
    return worst


# All but those that screening stops (NaN) and those on labels, which there are none of.
ATTACKS: dict[str, AttackFunction] = {
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
    "shifted copies": shifted_copies,
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
