"""What a dataset is before anyone holds a part of it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Table:
    """Examples, and which of them test.

    Attributes
    ----------
    inputs : (m, ...) array of float32
    labels : (m,) array of int64
        From 0 to num_classes - 1.
    num_classes : int
    test : float or range
        The share of the examples to draw for testing, or the rows that were published
        as the test set. With 0 all examples train, and the same ones test.
    """

    inputs: NDArray[np.float32]
    labels: NDArray[np.int64]
    num_classes: int
    test: float | range

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.labels):
            raise ValueError(
                f"{len(self.inputs)} inputs and {len(self.labels)} labels must pair up"
            )
        if not isinstance(self.test, range) and not 0.0 <= self.test < 1.0:
            raise ValueError(
                f"test_fraction={self.test} must lie in [0, 1); with 0 the training "
                "examples are also the test set"
            )
        if not np.isfinite(self.inputs).all():
            raise ValueError("inputs must be finite; drop or fill missing values")

    def __len__(self) -> int:
        return len(self.labels)


class Source(Hashable, Protocol):
    """Where a dataset comes from; equal sources hold equal data."""

    def load(self) -> Table:
        """Return all examples, always in the same order."""
        ...
