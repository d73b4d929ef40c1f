"""Regularised logistic regression, with the constants that the theorem needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Problem:
    """Logistic regression without intercept, as h honest clients hold it.

    Attributes
    ----------
    features : (h, m, d) array
        Of norm 1.
    labels : (h, m) array
        0 or 1.
    weight_decay : float
        lambda, which is mu.
    """

    features: Floats
    labels: Floats
    weight_decay: float

    @cached_property
    def smoothness(self) -> float:
        """L = lambda_max(X^T X)/(4 m) + lambda."""
        x = self.features.reshape(-1, self.features.shape[-1])
        return float(np.linalg.eigvalsh(x.T @ x / (4 * len(x)))[-1]) + self.weight_decay

    def loss(self, theta: Floats) -> float:
        """Return the average of the honest clients' losses."""
        logits = self.features @ theta
        losses = np.logaddexp(0.0, logits) - self.labels * logits
        return float(losses.mean() + self.weight_decay / 2 * theta @ theta)

    def gradients(self, theta: Floats, rows: NDArray[np.intp]) -> Floats:
        """Return gradients of the clients, (h, d), on batches of `rows`, (h, b)."""
        clients = np.arange(len(rows))[:, None]
        x, y = self.features[clients, rows], self.labels[clients, rows]
        residuals = 1.0 / (1.0 + np.exp(-(x @ theta))) - y
        mean: Floats = np.einsum("hb,hbd->hd", residuals, x) / rows.shape[1]
        return mean + self.weight_decay * theta

    @cached_property
    def minimiser(self) -> Floats:
        """The model with the smallest loss."""
        h, m, d = self.features.shape
        everything = np.tile(np.arange(m), (h, 1))

        def gradient(theta: Floats) -> Floats:
            mean: Floats = self.gradients(theta, everything).mean(axis=0)
            return mean

        start = np.zeros(d)
        found = minimize(self.loss, start, jac=gradient, options={"gtol": 1e-10})
        best: Floats = found.x
        return best

    @cached_property
    def heterogeneity(self) -> float:
        """Gcov at the minimiser: at most the theorem's, a supremum over models."""
        h, m, _ = self.features.shape
        each = self.gradients(self.minimiser, np.tile(np.arange(m), (h, 1)))
        centred = each - each.mean(axis=0)
        return float(np.linalg.norm(centred, ord=2) / np.sqrt(h))
