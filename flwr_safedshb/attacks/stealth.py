"""Attacks that hide among the honest vectors without knowing the server's rule."""

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from flwr_safedshb.aggregation.rule import FloatArray
from flwr_safedshb.aggregation.scatter import squared_distances
from flwr_safedshb.attacks.base import Aggregate, Attack


@dataclass(frozen=True)
class Mimic(Attack):
    """Copy one honest client, so that it counts f + 1 times.

    Karimireddy et al., "Byzantine-Robust Learning on Heterogeneous Datasets via
    Bucketing", ICLR 2022, find the direction of the largest variance over some steps of
    warm-up and keep to the client that stands out along it. This one does so in every
    step afresh and has no state: what clients send are momentums, which differ little
    from step to step, and so does the choice.
    """

    def craft_vectors(
        self, honest: FloatArray, f: int, rng: np.random.Generator, aggregate: Aggregate
    ) -> FloatArray:
        """Return the vector, (d,), farthest out along the top principal direction."""
        centred = honest - honest.mean(axis=0)
        # With Y = U S V^T, the projections of the rows of Y on the first principal
        # direction are s_1 U_1, so the Gram matrix Y Y^T is enough.
        top = np.linalg.eigh(centred @ centred.T)[1][:, -1]
        chosen: FloatArray = honest[np.argmax(np.abs(top))]
        return chosen


@dataclass(frozen=True)
class _DistanceBounded(Attack):
    """Send mean - gamma * std with the largest gamma that a distance bound allows."""

    @abstractmethod
    def max_strength(self, centred: FloatArray, direction: FloatArray) -> float:
        """Return the largest gamma that the bound allows for mean + gamma * direction.

        Parameters
        ----------
        centred : (h, d) array
            Honest vectors minus their mean.
        direction : (d,) array, not zero
        """

    def craft_vectors(
        self, honest: FloatArray, f: int, rng: np.random.Generator, aggregate: Aggregate
    ) -> FloatArray:
        """Return the one vector, (d,), that all adversaries send."""
        mean: FloatArray = honest.mean(axis=0)
        direction = -honest.std(axis=0)
        if not direction.any():
            return mean
        gamma = self.max_strength(honest - mean, direction)
        sent: FloatArray = mean + gamma * direction
        return sent


@dataclass(frozen=True)
class MinMax(_DistanceBounded):
    """Stay as close to every honest vector as the two farthest of them are.

    Shejwalkar and Houmansadr, "Manipulating the Byzantine", NDSS 2021, with their
    inverse standard deviation as the direction, and gamma in closed form.
    """

    def max_strength(self, centred: FloatArray, direction: FloatArray) -> float:
        """Solve ||y_i - gamma b||^2 = max_jk ||y_j - y_k||^2 for each i, b = direction.

        Returns the smallest of the roots.
        """
        squared_diameter = squared_distances(centred @ centred.T).max()
        squared_norm = direction @ direction
        products = centred @ direction
        slack = np.maximum(squared_diameter - np.square(centred).sum(axis=1), 0.0)
        roots = (products + np.sqrt(products**2 + squared_norm * slack)) / squared_norm
        return float(roots.min())


@dataclass(frozen=True)
class MinSum(_DistanceBounded):
    """Keep the sum of squared distances to the honest vectors within an honest one's.

    From the same paper as `MinMax`, with the same direction.
    """

    def max_strength(self, centred: FloatArray, direction: FloatArray) -> float:
        """Solve sum_i ||y_i - gamma b||^2 = max_j sum_i ||y_i - y_j||^2, as above."""
        # The y_i sum to zero: the left is h gamma^2 b^2 + sum_i y_i^2, the right
        # h max_j y_j^2 + sum_i y_i^2.
        largest_square = np.square(centred).sum(axis=1).max()
        return float(np.sqrt(largest_square / (direction @ direction)))
