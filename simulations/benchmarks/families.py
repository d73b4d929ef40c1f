"""Vectors to aggregate: what clients send, and what is made to defeat a search."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]

FAMILIES = ("alie", "sign-flip", "isotropic", "heterogeneous")

# Hostile deviations in units of the honest one, by seed: from well inside the honest
# cloud, through where the colluders are just worth keeping, to plainly outside.
ALIE_DEVIATIONS = (0.25, 0.5, 0.75, 1.0, 1.5)


def make_family(name: str, n: int, f: int, d: int, seed: int) -> Vectors:
    """Return n vectors of dimension d, the first f of them hostile if any is.

    Parameters
    ----------
    name : str
        "alie": f colluders at mean + z standard deviations of the honest vectors, z by
        `ALIE_DEVIATIONS`; "sign-flip": at the negative mean; "isotropic": nobody stands
        out, so nothing can be pruned early; "heterogeneous": nobody is hostile, and the
        spread differs between clients by a factor of up to 15.
    n, f, d : int
        Clients, adversaries among them, dimension.
    seed : int

    Returns
    -------
    (n, d) float32 array
    """
    rng = np.random.default_rng([seed, FAMILIES.index(name)])
    vectors = rng.standard_normal((n, d), dtype=np.float32)
    honest = vectors[f:]
    if name == "alie":
        deviation = ALIE_DEVIATIONS[seed % len(ALIE_DEVIATIONS)]
        vectors[:f] = honest.mean(axis=0) + deviation * honest.std(axis=0)
    elif name == "sign-flip":
        honest += rng.standard_normal(d, dtype=np.float32)
        vectors[:f] = -honest.mean(axis=0)
    elif name == "heterogeneous":
        vectors *= rng.uniform(0.2, 3.0, size=(n, 1)).astype(np.float32)
    return vectors


def make_circle(n: int) -> Vectors:
    """Return n points on a circle, (n, 2): many subsets are nearly as good."""
    angles = 2.0 * np.pi * np.arange(n) / n
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def make_clusters(n: int, d: int, seed: int) -> Vectors:
    """Return n vectors, (n, d), in two clusters far from each other."""
    rng = np.random.default_rng([seed, len(FAMILIES)])
    vectors = rng.standard_normal((n, d), dtype=np.float32)
    vectors[: n // 2] += 4.0 * rng.standard_normal(d, dtype=np.float32)
    return vectors


def make_simplices(corners: int, copies: int) -> Vectors:
    """Return the corners of a simplex several times: many subsets tie."""
    return np.repeat(np.eye(corners, dtype=np.float32), copies, axis=0)


# Name to vectors and f.
HOSTILE: dict[str, tuple[Vectors, int]] = {
    "circle (40, 15)": (make_circle(40), 15),
    "circle (60, 12)": (make_circle(60), 12),
    "20 corners x 2 (40, 15)": (make_simplices(20, 2), 15),
    "10 corners x 4 (40, 15)": (make_simplices(10, 4), 15),
    "20 corners x 3 (60, 12)": (make_simplices(20, 3), 12),
}
