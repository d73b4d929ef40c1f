"""NNM: replace every vector by the mean of its nearest before another rule sees it.

Allouah et al., "Fixing by Mixing: A Recipe for Optimal Byzantine ML under
Heterogeneity", AISTATS 2023.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from flwr_safedshb.aggregation.coordinatewise import CoordinatewiseRule
from flwr_safedshb.aggregation.gram import (
    GramRule,
    careful_gram,
    check_gram,
    scale_into_range,
    squared_distances,
    weighted_lambda,
)
from flwr_safedshb.aggregation.rule import Clients, FloatArray, Floats, Rule, Weighing
from flwr_safedshb.theory import kappa_nnm


@dataclass(frozen=True)
class NNM(GramRule):
    """Nearest-neighbour mixing before a rule.

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
        mixing = _mixing(gram, f)
        weights = self.rule.weigh(mixing @ gram @ mixing.T, f).weights @ mixing
        value = weighted_lambda(gram, weights)
        return Weighing(weights, subset=None, lambda_max=value)

    def aggregate(
        self, clients: Clients, f: int
    ) -> tuple[list[Floats], Weighing | None]:
        """Mix and aggregate; block by block where the rule is coordinate-wise."""
        if isinstance(self.rule, CoordinatewiseRule):
            near, _ = scale_into_range(clients, f)
            mixing = _mixing(careful_gram(near, f), f)
            return self.rule.reduce_blocks(clients, f, mixing), None
        return super().aggregate(clients, f)

    def scaled(self, exponent: int) -> Self:
        """Return the rule for vectors in another unit."""
        inner = self.rule
        return (
            replace(self, rule=inner.scaled(exponent))
            if isinstance(inner, GramRule)
            else self
        )

    def kappa(self, n: int, f: int) -> float | None:
        """Return 8f/(n-f) (kappa + 1) for the rule's own constant, if it has one."""
        inner = self.rule.kappa(n, f)
        proven = inner is not None and self.rule.notion != "spectral bound"
        return kappa_nnm(n, f, inner) if proven and inner is not None else None


def _mixing(gram: FloatArray, f: int) -> FloatArray:
    """Return the (n, n) matrix that averages every vector with its n - f nearest."""
    n = len(gram)
    nearest = np.argsort(squared_distances(gram), axis=1, kind="stable")[:, : n - f]
    mixing = np.zeros((n, n))
    np.put_along_axis(mixing, nearest, 1.0 / (n - f), axis=1)
    return mixing
