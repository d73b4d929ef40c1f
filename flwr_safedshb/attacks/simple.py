"""Attacks that do not hide, for rules that trust and servers that do not check."""

from dataclasses import dataclass

import numpy as np

from flwr_safedshb.aggregation.rule import FloatArray, check_positive
from flwr_safedshb.attacks.base import Aggregate, Attack


@dataclass(frozen=True)
class SignFlip(Attack):
    """Send -mean: `FOE` with tau = 2."""

    def craft_vectors(
        self, honest: FloatArray, f: int, rng: np.random.Generator, aggregate: Aggregate
    ) -> FloatArray:
        """Return the negated mean, (d,)."""
        negated: FloatArray = -honest.mean(axis=0)
        return negated


@dataclass(frozen=True)
class Zero(Attack):
    """Send zeros: contribute nothing, yet be counted."""

    def craft_vectors(
        self, honest: FloatArray, f: int, rng: np.random.Generator, aggregate: Aggregate
    ) -> FloatArray:
        """Return zeros, (d,)."""
        return np.zeros(honest.shape[1])


@dataclass(frozen=True)
class Gaussian(Attack):
    """Send noise alone, drawn for each adversary.

    Parameters
    ----------
    std : float
        Standard deviation of every coordinate; default of Blanchard et al., 2017.
    """

    std: float = 200.0

    def __post_init__(self) -> None:
        check_positive("std", self.std)

    def craft_vectors(
        self, honest: FloatArray, f: int, rng: np.random.Generator, aggregate: Aggregate
    ) -> FloatArray:
        """Return noise, (f, d)."""
        return rng.normal(scale=self.std, size=(f, honest.shape[1]))


@dataclass(frozen=True)
class NonFinite(Attack):
    """Send the honest mean with one coordinate that is no number.

    NaN, infinity and minus infinity in turn, in a coordinate drawn for each adversary:
    a check that looks at a part of the vector, or at one kind, lets some through.
    """

    def craft_vectors(
        self, honest: FloatArray, f: int, rng: np.random.Generator, aggregate: Aggregate
    ) -> FloatArray:
        """Return spoilt means, (f, d)."""
        sent = np.tile(honest.mean(axis=0), (f, 1))
        coordinates = rng.integers(honest.shape[1], size=f)
        sent[np.arange(f), coordinates] = np.resize([np.nan, np.inf, -np.inf], f)
        return sent


@dataclass(frozen=True)
class HugeNorm(Attack):
    """Send huge finite vectors, each in a direction of its own.

    Parameters
    ----------
    norm : float
        Their norm. The default is finite in float32, its square is not.
    """

    norm: float = 1e30

    def __post_init__(self) -> None:
        check_positive("norm", self.norm)

    def craft_vectors(
        self, honest: FloatArray, f: int, rng: np.random.Generator, aggregate: Aggregate
    ) -> FloatArray:
        """Return vectors, (f, d), of the given norm."""
        return self.norm * _unit_directions(f, honest.shape[1], rng)


@dataclass(frozen=True)
class FarCluster(Attack):
    """Send a tight cluster far from the honest mean, in a direction drawn each step.

    Tight, so that rules that look for vectors close together may prefer it.

    Parameters
    ----------
    distance : float
        Of its centre from the honest mean; clipped gradients have norms of about 1.
    radius : float
        Of the sphere about the centre on which the vectors lie.
    """

    distance: float = 100.0
    radius: float = 1e-3

    def __post_init__(self) -> None:
        check_positive("distance", self.distance)
        if not 0.0 <= self.radius < np.inf:
            raise ValueError(f"radius={self.radius} must be finite and at least 0")

    def craft_vectors(
        self, honest: FloatArray, f: int, rng: np.random.Generator, aggregate: Aggregate
    ) -> FloatArray:
        """Return the cluster, (f, d)."""
        away, *around = _unit_directions(1 + f, honest.shape[1], rng)
        centre = honest.mean(axis=0) + self.distance * away
        cluster: FloatArray = centre + self.radius * np.array(around)
        return cluster


def _unit_directions(count: int, d: int, rng: np.random.Generator) -> FloatArray:
    """Return vectors of norm 1, (count, d), uniform on the sphere."""
    normal = rng.normal(size=(count, d))
    directions: FloatArray = normal / np.linalg.norm(normal, axis=1, keepdims=True)
    return directions
