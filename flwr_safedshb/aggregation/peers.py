"""Rules that other libraries ship (ByzFL, ByzPy, Blades), to compare with and attack.

None has a constant that is proven here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.aggregation.baselines import krum_order, subset_mean
from flwr_safedshb.aggregation.coordinatewise import CoordinatewiseRule
from flwr_safedshb.aggregation.gram import (
    GramRule,
    centred_gram_matrix,
    check_gram,
    scale_into_range,
    single_threaded,
    weighted_sum,
)
from flwr_safedshb.aggregation.preaggregation import clip_norms, vector_norm
from flwr_safedshb.aggregation.rule import (
    Clients,
    FloatArray,
    Floats,
    Rule,
    Weighing,
    check_positive,
)
from flwr_safedshb.aggregation.scatter import scatter_gram, squared_distances


@dataclass(frozen=True)
class Meamed(CoordinatewiseRule):
    """In each coordinate the mean of the n - f values that are nearest to the median.

    Xie, Koyejo and Gupta, "Generalized Byzantine-tolerant SGD", 2018.
    """

    def reduce(self, block: FloatArray, f: int) -> FloatArray:
        """Return the mean around the median of each column."""
        return _mean_around_median(block, len(block) - f)


@dataclass(frozen=True)
class Bulyan(Rule):
    """Of the n - 2f vectors that Krum likes best, the mean around the median.

    El Mhamdi, Guerraoui and Rouault, "The Hidden Vulnerability of Distributed Learning
    in Byzantium", ICML 2018: in each coordinate, n - 4f of the selected values count.
    Theirs needs n >= 4f + 3; with n <= 4f this one answers with the median of the
    selected. Theirs runs Krum anew after every selection; here the scores are computed
    once, as that tie breaks where few vectors are left is chance.
    """

    def aggregate(self, clients: Clients, f: int) -> tuple[list[Floats], None]:
        """Select by inner products, then aggregate coordinate by coordinate."""
        near, _ = scale_into_range(clients, f)
        order = krum_order(centred_gram_matrix(near, f), f)
        selected = [clients[int(i)] for i in order[: len(clients) - 2 * f]]
        return _MeanAroundMedian().reduce_blocks(selected, f, None), None


@dataclass(frozen=True)
class _MeanAroundMedian(CoordinatewiseRule):
    """Without 2f of the values; without all but the middle where there are no more."""

    def reduce(self, block: FloatArray, f: int) -> FloatArray:
        """Return the mean around the median of each column."""
        n = len(block)
        return _mean_around_median(block, n - 2 * f if n > 2 * f else 2 - n % 2)


@dataclass(frozen=True)
class MoNNA(GramRule):
    """The mean of the n - f vectors that are nearest to a pivot.

    Farhadkhani et al., "Robust Collaborative Learning with Linear Gradient Overhead",
    ICML 2023. There every node takes its own vector as the pivot. A server has none, so
    the pivot is the choice of `Krum`.
    """

    def weigh(self, gram: FloatArray, f: int) -> Weighing:
        """Return equal weights on n - f vectors."""
        gram = check_gram(gram, f)
        pivot = krum_order(gram, f)[0]
        nearest = np.argsort(squared_distances(gram)[pivot], kind="stable")
        return subset_mean(gram, nearest[: len(gram) - f])


@dataclass(frozen=True)
class DnC(GramRule):
    """The mean of the n - f vectors that lie least far along the top direction.

    Shejwalkar and Houmansadr, "Manipulating the Byzantine", NDSS 2021. Theirs draws
    some coordinates at random, several times, because the direction in all of them is
    dear. From the Gram matrix it is cheap and exact, and once is enough.
    """

    @single_threaded
    def weigh(self, gram: FloatArray, f: int) -> Weighing:
        """Return equal weights on n - f vectors."""
        gram = check_gram(gram, f)
        # The projections of the centred vectors are s_1 u_1, with Y Y^T = U S^2 U^T.
        top = np.linalg.eigh(scatter_gram(squared_distances(gram)))[1][:, -1]
        order = np.argsort(np.abs(top), kind="stable")
        return subset_mean(gram, order[: len(gram) - f])


@dataclass(frozen=True)
class CGE(Rule):
    """The mean of the n - f shortest vectors (comparative gradient elimination).

    Gupta, Liu and Vaidya, "Byzantine Fault-Tolerant Distributed Machine Learning with
    Norm-Based Comparative Gradient Elimination", 2021.
    """

    def aggregate(self, clients: Clients, f: int) -> tuple[list[Floats], None]:
        """Average the shortest."""
        norms = [vector_norm(client) for client in clients]
        order = np.argsort(norms, kind="stable")
        return _average(clients, order[: len(clients) - f]), None


@dataclass(frozen=True)
class SignGuard(Rule):
    """The mean of vectors of usual length whose signs are like those of most.

    Xu et al., "Byzantine-robust Federated Learning through Collaborative Malicious
    Gradient Filtering", ICDCS 2022. Vectors whose norm is far from the median norm are
    left out; of the others the larger of two clusters by the shares of positive, zero
    and negative coordinates stays; longer ones are shortened to the median norm. Theirs
    counts the signs of a tenth of the coordinates, drawn at random, and here all count.

    Parameters
    ----------
    low, high : float
        Which norms are usual, in units of the median norm.
    """

    low: float = 0.1
    high: float = 3.0

    def __post_init__(self) -> None:
        check_positive("low", self.low)
        if not 2.0 <= self.high < np.inf or self.low > 1.0:
            # Or else no vector might be left, as of two very different ones.
            raise ValueError(
                f"low={self.low} must be at most 1 and high={self.high} at least 2"
            )

    def aggregate(self, clients: Clients, f: int) -> tuple[list[Floats], None]:
        """Filter by norm and by signs, shorten and average."""
        norms = np.array([vector_norm(client) for client in clients])
        typical = float(np.median(norms / 2.0) * 2.0)
        usual = np.flatnonzero(
            (norms / 2 >= self.low * (typical / 2)) & (norms / self.high <= typical)
        )
        signs = np.array([_count_signs(clients[int(i)]) for i in usual])
        kept = usual[_larger_cluster(signs)]
        return _average(clip_norms(clients, lambda _: typical), kept), None


def _mean_around_median(block: FloatArray, count: int) -> FloatArray:
    """Return the mean of the `count` values of each column nearest to its median."""
    # Sorted, so that equal distances are a matter of the values alone.
    block.sort(axis=0)
    middle = block[[(len(block) - 1) // 2, len(block) // 2]].mean(axis=0)
    nearest = np.argsort(np.abs(block - middle), axis=0, kind="stable")[:count]
    mean: FloatArray = np.take_along_axis(block, nearest, axis=0).mean(axis=0)
    return mean


def _average(clients: Clients, subset: NDArray[np.intp]) -> list[Floats]:
    weights = np.bincount(subset, minlength=len(clients)) / len(subset)
    return weighted_sum(clients, weights)


def _count_signs(client: Sequence[Floats]) -> FloatArray:
    """Return the shares, (3,), of positive, zero and negative coordinates."""
    signs = np.concatenate([np.sign(np.ravel(layer)) for layer in client])
    return np.array([(signs == sign).mean() for sign in (1.0, 0.0, -1.0)])


def _larger_cluster(points: FloatArray) -> NDArray[np.intp]:
    """Return the members of the larger of two clusters; of equally large ones, all.

    Two means, begun at the two points that are farthest apart.
    """
    # Sorted, so that ties are a matter of the points and not of the clients' order.
    order = np.lexsort(points.T)
    points = points[order]
    apart = np.square(points[:, None] - points[None]).sum(axis=2)
    centres = points[list(np.unravel_index(apart.argmax(), apart.shape))]
    nearer = np.zeros(len(points), dtype=bool)
    for _ in range(len(points)):
        away = np.square(points[:, None] - centres[None]).sum(axis=2)
        before, nearer = nearer, away[:, 0] <= away[:, 1]
        if nearer.all() or (nearer == before).all():
            break
        centres = np.array([points[nearer].mean(axis=0), points[~nearer].mean(axis=0)])
    first, second = np.flatnonzero(nearer), np.flatnonzero(~nearer)
    if len(first) == len(second):
        return order
    return order[max(first, second, key=len)]
