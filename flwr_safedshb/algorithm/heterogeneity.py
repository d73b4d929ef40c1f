"""How far honest momentums differ, as far as the server can tell."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flwr_safedshb.aggregation.rule import Floats, Weighing
from flwr_safedshb.theory import heterogeneity_estimate


def estimates(
    momentums: Sequence[Sequence[Floats]],
    direction: Sequence[Floats],
    weighing: Weighing,
    noise_std: float,
) -> dict[str, float]:
    """Estimate how far honest momentums differ, from those that count in R_t."""
    weights = weighing.weights
    squares = [sum(_square(layer) for layer in layers) for layers in momentums]
    # The trace of their covariance: the mean square less the square of the mean.
    trace = float(weights @ squares) - sum(map(_square, direction))
    vectors = max(1, round(1.0 / float(weights @ weights)))
    size = sum(layer.size for layer in direction)
    total, top = heterogeneity_estimate(
        max(trace, 0.0), weighing.lambda_max, vectors, size, noise_std
    )
    return {"heterogeneity-estimate": total, "heterogeneity-spectral-estimate": top}


def _square(layer: Floats) -> float:
    flat = np.ravel(layer).astype(np.float64)
    return float(flat @ flat)
