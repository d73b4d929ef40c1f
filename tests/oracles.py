"""Slow, literal definitions that the fast code is held to, and inputs that try it."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def covariance_lambda(vectors: Floats) -> float:
    """lambda_max of the empirical covariance, factor 1/|S|, from the definition."""
    centred = vectors - vectors.mean(axis=0)
    covariance = centred.T @ centred / len(vectors)
    return float(np.linalg.eigvalsh(covariance)[-1])


def subsets(n: int, size: int) -> Iterator[list[int]]:
    for subset in combinations(range(n), size):
        yield list(subset)


def brute_force_smea(vectors: Floats, f: int) -> tuple[float, list[list[int]]]:
    """Smallest lambda_max and every subset that has it, ties to 1e-9 included."""
    n = len(vectors)
    values = [(covariance_lambda(vectors[s]), s) for s in subsets(n, n - f)]
    smallest = min(value for value, _ in values)
    scale = smallest * 1e-9 + 1e-14 * float(np.median(np.sum(vectors**2, axis=1)))
    return smallest, [s for value, s in values if value <= smallest + scale]


FAMILIES = (
    "isotropic",
    "sign-flip",
    "alie",
    "far-point",
    "very-far",
    "duplicates",
    "all-equal",
    "collinear",
    "lattice",
    "clusters",
    "offset",
    "heterogeneous",
)


def family(name: str, n: int, f: int, d: int, rng: np.random.Generator) -> Floats:
    """n vectors, the first f of them hostile where the family has an attack."""
    x = rng.normal(size=(n, d))
    honest = x[f:]
    if name == "sign-flip":
        honest += rng.normal(size=d)
        x[:f] = -honest.mean(axis=0)
    elif name == "alie":
        x[:f] = honest.mean(axis=0) + rng.uniform(0, 3) * honest.std(axis=0)
    elif name == "far-point":
        x[0] += 1e3
    elif name == "very-far":
        x[: max(1, f)] *= 1e30
    elif name == "duplicates":
        x = x[rng.integers(0, n, size=n)]
    elif name == "all-equal":
        x[:] = x[0]
    elif name == "collinear":
        x = np.outer(rng.normal(size=n), x[0])
    elif name == "lattice":
        x = np.round(x)
    elif name == "clusters":
        x[: n // 2] += 4.0 * rng.normal(size=d)
    elif name == "offset":
        x += 1e4
    elif name == "heterogeneous":
        x *= rng.uniform(0.2, 3.0, size=(n, 1))
    return x
