"""Estimate the heterogeneity of honest clients from their noisy momentums."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flwr_safedshb.aggregation.rule import Floats, Weighing
from flwr_safedshb.theory import heterogeneity_estimate


def estimate_heterogeneity(
    momentums: Sequence[Sequence[Floats]],
    direction: Sequence[Floats],
    weighing: Weighing,
    noise_std: float,
) -> dict[str, float]:
    """Estimate G and Gcov from the selected momentums, with the noise subtracted.

    Parameters
    ----------
    momentums : sequence of n lists of layers
    direction : list of layers
        R_t, the weighted mean of the momentums.
    weighing : Weighing
    noise_std : float
        Standard deviation of the noise in an honest momentum.
    """
    weights = weighing.weights
    squares = [sum(_squared_norm(layer) for layer in layers) for layers in momentums]
    # The trace of their covariance: the mean square minus the square of the mean.
    trace = float(weights @ squares) - sum(map(_squared_norm, direction))
    vectors = max(1, round(1.0 / float(weights @ weights)))
    size = sum(layer.size for layer in direction)
    total, top = heterogeneity_estimate(
        max(trace, 0.0), weighing.lambda_max, vectors, size, noise_std
    )
    return {"heterogeneity-estimate": total, "heterogeneity-spectral-estimate": top}


def _squared_norm(layer: Floats) -> float:
    flat = np.ravel(layer).astype(np.float64)
    return float(flat @ flat)
