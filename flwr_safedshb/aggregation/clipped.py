"""Rules and pre-aggregations of others that limit how far one vector can reach.

They are here to be compared and attacked; none has a constant that is proven for the
spectral norm.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from flwr_safedshb.aggregation.gram import (
    GramRule,
    check_gram,
    largest_value,
    nearest_sums,
    scale_by_power,
    squared_distances,
    weighted_lambda,
    weighted_sum,
)
from flwr_safedshb.aggregation.rule import (
    Clients,
    FloatArray,
    Floats,
    Layers,
    Rule,
    Weighing,
    check_positive,
    check_vectors,
)


@dataclass(frozen=True)
class StaticClipping(Rule):
    """Shorten vectors to a fixed norm before a rule sees them.

    Parameters
    ----------
    rule : Rule
        What aggregates the shortened vectors.
    bound : float
        The largest norm that is left as it is.
    """

    rule: Rule
    bound: float = 1.0

    def __post_init__(self) -> None:
        check_positive("bound", self.bound)

    def aggregate(self, clients: Clients, f: int) -> tuple[list[Floats], None]:
        """Shorten and aggregate."""
        layers, _ = self.rule.aggregate(_clipped(clients, lambda _: self.bound), f)
        return layers, None


@dataclass(frozen=True)
class ARC(Rule):
    """Shorten the longest vectors to the norm of the longest that is left.

    Allouah et al., "Adaptive Gradient Clipping for Robust Federated Learning", ICLR
    2025: the k = floor(2 f/n (n - f)) longest are clipped to the norm of the next.

    Parameters
    ----------
    rule : Rule
        What aggregates the shortened vectors.
    """

    rule: Rule

    def aggregate(self, clients: Clients, f: int) -> tuple[list[Floats], None]:
        """Shorten and aggregate."""
        n = len(clients)
        k = (2 * f * (n - f)) // n
        shorter = _clipped(clients, lambda norms: float(np.sort(norms)[n - 1 - k]))
        layers, _ = self.rule.aggregate(shorter, f)
        return layers, None


@dataclass(frozen=True)
class Bucketing(Rule):
    """Average vectors in buckets drawn at random, and let a rule see the averages.

    Karimireddy et al., "Byzantine-Robust Learning on Heterogeneous Datasets via
    Bucketing", ICLR 2022. Every adversary may spoil a bucket, so the rule has to
    withstand f of ceil(n / size).

    Parameters
    ----------
    rule : Rule
        What aggregates the averages.
    size : int
        Vectors in a bucket; the last may hold fewer.
    seed : int
        Of the buckets, which are drawn anew in every call: who tries the rule before
        the server does, sees others than it.
    """

    rule: Rule
    size: int = 2
    seed: int = 0
    _rng: np.random.Generator = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size={self.size} must be at least 1")
        object.__setattr__(self, "_rng", np.random.default_rng(self.seed))

    def aggregate(self, clients: Clients, f: int) -> tuple[list[Floats], None]:
        """Average buckets and aggregate.

        Raises
        ------
        ValueError
            If f adversaries may spoil half of the buckets.
        """
        n = len(clients)
        count = -(-n // self.size)
        if 2 * f >= count:
            raise ValueError(
                f"f={f} adversaries may spoil half of the {count} buckets of n={n} "
                f"vectors; lower size={self.size}"
            )
        order = self._rng.permutation(n)
        buckets = [order[i : i + self.size] for i in range(0, n, self.size)]
        averages = []
        for bucket in buckets:
            weights = np.zeros(n)
            weights[bucket] = 1.0 / len(bucket)
            averages.append(weighted_sum(clients, weights))
        layers, _ = self.rule.aggregate(check_vectors(averages, f), f)
        return layers, None


@dataclass(frozen=True)
class CentredClipping(GramRule):
    """Let every vector pull the aggregate no farther than a radius.

    Karimireddy, He and Jaggi, "Learning from History for Byzantine Robust
    Optimization", ICML 2021. Theirs starts from the last aggregate; this one has no
    memory and starts from the vector that has its n - f nearest around it most closely.

    Parameters
    ----------
    radius : float
        tau of the paper.
    iterations : int
    """

    radius: float = 1.0
    iterations: int = 10

    def __post_init__(self) -> None:
        check_positive("radius", self.radius)
        if self.iterations < 1:
            raise ValueError(f"iterations={self.iterations} must be at least 1")

    def scaled(self, exponent: int) -> Self:
        """Return the rule for vectors in another unit: a radius stays above 0."""
        radius = float(scale_by_power(self.radius, exponent))
        return replace(self, radius=max(radius, np.finfo(float).tiny))

    def weigh(self, gram: FloatArray, f: int) -> Weighing:
        """Return the weights after all iterations."""
        gram = check_gram(gram, f)
        n, distances = len(gram), squared_distances(gram)
        weights = np.zeros(n)
        weights[np.argmin(nearest_sums(distances, n - f))] = 1.0
        for _ in range(self.iterations):
            # |x_i - v|^2 for v = sum_j w_j x_j. By inner products: among distances, a
            # vector of norm 1e30 leaves no digit of the others.
            products = gram @ weights
            squares = np.diagonal(gram) - 2.0 * products + weights @ products
            far = np.sqrt(np.maximum(squares, 0.0))
            near = far <= self.radius
            pulls = np.where(near, 1.0, self.radius / np.where(near, 1.0, far)) / n
            weights = weights * (1.0 - pulls.sum()) + pulls
        return Weighing(weights, None, weighted_lambda(gram, weights))


def _clipped(clients: Clients, bound: Callable[[FloatArray], float]) -> Clients:
    """Return the vectors, none longer than `bound` makes of all their norms."""
    norms = np.array([_norm(client) for client in clients])
    limit = bound(norms)
    return [
        client
        if norm <= limit
        else [(layer * (limit / norm)).astype(layer.dtype) for layer in client]
        for client, norm in zip(clients, norms, strict=True)
    ]


def _norm(client: Layers) -> float:
    """Return the length of a vector; squares of its shares cannot overflow."""
    size = largest_value(client)
    if size == 0.0:
        return 0.0
    flat = [np.divide(np.ravel(layer), size, dtype=np.float64) for layer in client]
    with np.errstate(over="ignore"):
        length = size * math.sqrt(sum(float(np.vdot(part, part)) for part in flat))
    return min(length, float(np.finfo(float).max))
