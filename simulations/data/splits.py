"""Who holds what: ways to share the training examples out among nodes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.int64]
Rows = NDArray[np.int64]

_MAX_DRAWS = 1000


class Split(Hashable, Protocol):
    """A way to share examples out."""

    def __call__(
        self, labels: Labels, count: int, rng: np.random.Generator
    ) -> list[Rows]:
        """Return the rows of each of `count` nodes; no row goes to two nodes.

        Parameters
        ----------
        labels : (m,) array
            Of the examples, which are in a random order.
        count : int
        rng : Generator
        """
        ...


@dataclass(frozen=True)
class Iid:
    """Equal parts at random; m mod count examples are left over."""

    def __call__(
        self, labels: Labels, count: int, rng: np.random.Generator
    ) -> list[Rows]:
        """Return m // count rows for each node."""
        return _equal_parts(np.arange(len(labels)), count)


@dataclass(frozen=True)
class ByLabel:
    """Equal parts of the examples in the order of their labels: the least mixed."""

    def __call__(
        self, labels: Labels, count: int, rng: np.random.Generator
    ) -> list[Rows]:
        """Return m // count rows for each node."""
        # Stable, so the order within a label stays the random one. What is left over
        # must not all be of the last label.
        used = labels[: len(labels) // count * count]
        return _equal_parts(np.argsort(used, kind="stable"), count)


@dataclass(frozen=True)
class Dirichlet:
    """The shares of each label among the nodes follow a Dirichlet distribution.

    Small `alpha`: few nodes hold most of a label; large: about equal shares. The nodes
    hold different numbers of examples. Draws that leave a node with fewer than
    `min_examples` are drawn again.
    """

    alpha: float
    min_examples: int

    def __post_init__(self) -> None:
        if not (0.0 < self.alpha < float("inf")):
            raise ValueError(f"alpha={self.alpha} must be above 0 and finite")

    def __call__(
        self, labels: Labels, count: int, rng: np.random.Generator
    ) -> list[Rows]:
        """Return the rows of each node, all rows in total."""
        by_label = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        for _ in range(_MAX_DRAWS):
            parts: list[list[Rows]] = [[] for _ in range(count)]
            for rows in by_label:
                shares = rng.dirichlet(np.full(count, self.alpha))
                ends = np.rint(np.cumsum(shares[:-1]) * len(rows)).astype(np.int64)
                for part, piece in zip(parts, np.split(rows, ends), strict=True):
                    part.append(piece)
            joined = [np.concatenate(part) for part in parts]
            if min(map(len, joined)) >= self.min_examples:
                return joined
        raise ValueError(
            f"in {_MAX_DRAWS} draws with alpha={self.alpha} some of {count} nodes held "
            f"fewer than min_examples={self.min_examples} of {len(labels)} examples; "
            "raise split.alpha, or lower split.min_examples or the number of nodes"
        )


@dataclass(frozen=True)
class Unequal:
    """Parts of given sizes, at random: small nodes and large ones.

    >>> Unequal((1, 2))(np.zeros(4, np.int64), 2, np.random.default_rng(0))
    [array([0]), array([1, 2])]
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes))
        for size in self.sizes:
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"sizes={self.sizes} must be whole numbers above 0")

    def __call__(
        self, labels: Labels, count: int, rng: np.random.Generator
    ) -> list[Rows]:
        """Return as many rows for each node as its size says."""
        total = sum(self.sizes)
        if len(self.sizes) != count or total > len(labels):
            raise ValueError(
                f"split.sizes={list(self.sizes)} are for {len(self.sizes)} nodes and "
                f"{total} examples, and there are {count} nodes that hold "
                f"{len(labels)}; give a size for each node, and no more than there are"
            )
        ends = np.cumsum(self.sizes)
        return np.split(np.arange(total), ends[:-1])


def _equal_parts(rows: Rows, count: int) -> list[Rows]:
    size = len(rows) // count
    return [rows[i * size : (i + 1) * size] for i in range(count)]
