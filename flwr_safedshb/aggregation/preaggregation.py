"""Pre-aggregations of others: what is done to the vectors before a rule sees them.

None but `NNM` has a proven constant, and none has one for the spectral norm.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from flwr_safedshb.aggregation.coordinatewise import CoordinatewiseRule
from flwr_safedshb.aggregation.gram import (
    GramRule,
    centred_gram_matrix,
    check_gram,
    max_abs_value,
    scale_into_range,
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
from flwr_safedshb.aggregation.scatter import squared_distances, weighted_lambda
from flwr_safedshb.theory import kappa_nnm


@dataclass(frozen=True)
class NNM(GramRule):
    """Nearest-neighbour mixing: replace every vector by the mean of its n - f nearest.

    Allouah et al., "Fixing by Mixing: A Recipe for Optimal Byzantine ML under
    Heterogeneity", AISTATS 2023.

    Parameters
    ----------
    rule : Rule
        What aggregates the mixed vectors. `weigh` needs a rule that has weights itself.
    """

    rule: Rule

    def weigh(self, gram: FloatArray, f: int) -> Weighing:
        """Return the weights of the rule, carried back to the vectors themselves."""
        if not isinstance(self.rule, GramRule):
            raise TypeError(f"{self.rule} has no weights; call the rule on vectors")
        gram = check_gram(gram, f)
        mixing = _mixing_matrix(gram, f)
        weights = self.rule.weigh(mixing @ gram @ mixing.T, f).weights @ mixing
        value = weighted_lambda(gram, weights)
        return Weighing(weights, subset=None, lambda_max=value)

    def aggregate(
        self, clients: Clients, f: int
    ) -> tuple[list[Floats], Weighing | None]:
        """Mix and aggregate; block by block where the rule is coordinate-wise."""
        if isinstance(self.rule, CoordinatewiseRule):
            near, _ = scale_into_range(clients, f)
            mixing = _mixing_matrix(centred_gram_matrix(near, f), f)
            return self.rule.reduce_blocks(clients, f, mixing), None
        return super().aggregate(clients, f)

    def change_unit(self, exponent: int) -> Self:
        """Return the rule for vectors in another unit."""
        if not isinstance(self.rule, GramRule):
            return self
        return replace(self, rule=self.rule.change_unit(exponent))

    def kappa(self, n: int, f: int) -> float | None:
        """Return 8f/(n-f) (kappa + 1) for the rule's own constant, if it has one."""
        inner = self.rule.kappa(n, f)
        if inner is None or self.rule.kappa_kind == "spectral bound":
            return None
        return kappa_nnm(n, f, inner)


@dataclass(frozen=True)
class StaticClipping(Rule):
    """Clip vectors to a fixed norm before a rule sees them.

    Parameters
    ----------
    rule : Rule
        What aggregates the clipped vectors.
    bound : float
        The largest norm that is not clipped.
    """

    rule: Rule
    bound: float = 1.0

    def __post_init__(self) -> None:
        check_positive("bound", self.bound)

    def aggregate(self, clients: Clients, f: int) -> tuple[list[Floats], None]:
        """Clip and aggregate."""
        layers, _ = self.rule.aggregate(clip_norms(clients, lambda _: self.bound), f)
        return layers, None


@dataclass(frozen=True)
class ARC(Rule):
    """Adaptive robust clipping: clip the k longest vectors to the norm of the next.

    Allouah et al., "Adaptive Gradient Clipping for Robust Federated Learning", ICLR
    2025, with their k = floor(2 f/n (n - f)).

    Parameters
    ----------
    rule : Rule
        What aggregates the clipped vectors.
    """

    rule: Rule

    def aggregate(self, clients: Clients, f: int) -> tuple[list[Floats], None]:
        """Clip and aggregate."""
        n = len(clients)
        k = (2 * f * (n - f)) // n
        shorter = clip_norms(clients, lambda norms: float(np.sort(norms)[n - 1 - k]))
        layers, _ = self.rule.aggregate(shorter, f)
        return layers, None


@dataclass(frozen=True)
class Bucketing(Rule):
    """Average vectors in random buckets before a rule sees the averages.

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
        Of the buckets. They are drawn anew in every call, so an adversary who tries the
        rule before the server does sees other buckets.
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


def _mixing_matrix(gram: FloatArray, f: int) -> FloatArray:
    """Return the (n, n) matrix that averages every vector with its n - f nearest."""
    n = len(gram)
    nearest = np.argsort(squared_distances(gram), axis=1, kind="stable")[:, : n - f]
    mixing = np.zeros((n, n))
    np.put_along_axis(mixing, nearest, 1.0 / (n - f), axis=1)
    return mixing


def clip_norms(clients: Clients, bound: Callable[[FloatArray], float]) -> Clients:
    """Return the vectors clipped to `bound` of their norms, (n,)."""
    norms = np.array([vector_norm(client) for client in clients])
    limit = bound(norms)
    return [
        client
        if norm <= limit
        else [(layer * (limit / norm)).astype(layer.dtype) for layer in client]
        for client, norm in zip(clients, norms, strict=True)
    ]


def vector_norm(client: Layers) -> float:
    """Return the norm of a vector, without overflow of squares on the way."""
    size = max_abs_value(client)
    if size == 0.0:
        return 0.0
    flat = [np.divide(np.ravel(layer), size, dtype=np.float64) for layer in client]
    with np.errstate(over="ignore"):
        length = size * math.sqrt(sum(float(np.vdot(part, part)) for part in flat))
    return min(length, float(np.finfo(float).max))
