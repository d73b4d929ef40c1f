"""Means and slopes over seeds, with intervals that hold 95% of their bootstrap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RESAMPLES = 2000


class Estimate(TypedDict):
    """A figure with its interval."""

    value: float
    low: float
    high: float


def resampled(samples: Sequence[Floats], rng: np.random.Generator) -> Floats:
    """Return means of resampled seeds, (resamples, samples)."""
    columns = [
        sample[rng.integers(len(sample), size=(RESAMPLES, len(sample)))].mean(axis=1)
        for sample in samples
    ]
    return np.stack(columns, axis=1)


def estimate(value: float, resamples: Floats) -> Estimate:
    """Return a figure with the interval of its resamples."""
    low, high = np.quantile(resamples, [0.025, 0.975])
    return Estimate(value=float(value), low=float(low), high=float(high))


def slope(
    values: Sequence[float],
    samples: Sequence[Floats],
    start: float,
    rng: np.random.Generator,
) -> Estimate:
    """Fit log(mean error) against log(value), with its interval.

    Parameters
    ----------
    values : (k,) sequence
    samples : k arrays of errors
    start : float
        Smaller values are left out.
    rng : Generator
    """
    pairs = zip(values, samples, strict=True)
    samples = [sample for value, sample in pairs if value >= start]
    x = np.log([value for value in values if value >= start])
    weights = (x - x.mean()) / np.square(x - x.mean()).sum()
    means = np.array([sample.mean() for sample in samples])
    logs = np.log(resampled(samples, rng))
    return estimate(float(weights @ np.log(means)), logs @ weights)
