"""Rules that aggregate each coordinate independently."""

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from flwr_safedshb.aggregation.gram import apply_without_overflow, iterate_blocks
from flwr_safedshb.aggregation.rule import Clients, FloatArray, Floats, Rule
from flwr_safedshb.theory import kappa_median, kappa_trimmed_mean


class CoordinatewiseRule(Rule):
    """A rule that aggregates each coordinate independently."""

    @abstractmethod
    def reduce(self, block: FloatArray, f: int) -> FloatArray:
        """Reduce a block, (n, k), to (k,); the block may be overwritten."""

    def aggregate(self, clients: Clients, f: int) -> tuple[list[Floats], None]:
        """Aggregate block by block."""
        return self.reduce_blocks(clients, f, None), None

    def reduce_blocks(
        self, clients: Clients, f: int, mixing: FloatArray | None
    ) -> list[Floats]:
        """Reduce the coordinates of the vectors, or of `mixing` @ vectors, (n, n)."""
        result = [np.empty_like(layer, order="C") for layer in clients[0]]
        flat = [layer.reshape(-1) for layer in result]
        for layer, span, block in iterate_blocks(clients):
            dtype = flat[layer].dtype
            if mixing is not None:
                block = apply_without_overflow(mixing.__matmul__, block, dtype)
            flat[layer][span] = apply_without_overflow(
                lambda rows: self.reduce(rows, f), block, dtype
            )
        return result


@dataclass(frozen=True)
class Median(CoordinatewiseRule):
    """Coordinate-wise median; the mean of the two middle values for even n."""

    def reduce(self, block: FloatArray, f: int) -> FloatArray:
        """Return the median of each column."""
        middle: FloatArray = np.median(block, axis=0, overwrite_input=True)
        return middle

    def kappa(self, n: int, f: int) -> float:
        """Return 4 (1 + f/(n-2f))^2."""
        return kappa_median(n, f)


@dataclass(frozen=True)
class TrimmedMean(CoordinatewiseRule):
    """Coordinate-wise mean without the f largest and the f smallest values."""

    def reduce(self, block: FloatArray, f: int) -> FloatArray:
        """Return the trimmed mean of each column."""
        n = len(block)
        if f > 0:
            # Both cuts in one pass; what lies between needs no order.
            block.partition((f, n - f - 1), axis=0)
        kept: FloatArray = block[f : n - f].mean(axis=0)
        return kept

    def kappa(self, n: int, f: int) -> float:
        """Return 6f/(n-2f) (1 + f/(n-2f))."""
        return kappa_trimmed_mean(n, f)
