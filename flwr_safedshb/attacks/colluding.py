"""Attacks by colluders who search where to stand, which way to push, and how far.

The paper's attacks start from the honest mean. That wastes room: a set of one honest
vector and f copies of it, all shifted by c, has the covariance of two points, with its
top eigenvalue c^2 f/(f+1)^2. So colluders who gather around ONE honest client can go
much farther before a rule sees them as more spread than the honest ones.

No proven bound is broken by that. (f, kappa)-robustness allows an error of
sqrt(kappa lambda_max), and where that exceeds the gradient, adversaries can stop the
training: these attacks find out.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.aggregation.gram import FloatArray
from flwr_safedshb.attacks.base import Aggregate, Attack
from flwr_safedshb.attacks.candidates import (
    Candidates,
    check_finite,
    check_grid,
    harms,
    worst,
)

# How far the colluders go, in units of the honest vectors' root mean squared distance
# from their mean: five values a decade, and 0, which copies the client alone.
SCALES = (0.0, *(float(scale) for scale in np.geomspace(0.1, 10.0, 11)))
# A rule gives way in proportion to the scale until it rejects the colluders, so the
# last step before that decides: the best few rays are searched again, this much finer.
_REFINED, _FINER = 12, 6

Aim = Literal["descent", "distance"]
Direction = Literal["mean", "deviation", "spectrum"]
DIRECTIONS: tuple[Direction, ...] = ("mean", "deviation", "spectrum")


@dataclass(frozen=True)
class Rays:
    """Where the colluders may stand, and which way they may go from there.

    Attributes
    ----------
    basis : (r, d) array
        As in `Candidates`.
    starts, moves : (p, f, r) array
        On ray k at scale c, adversary j sends mean + (starts + c moves)[k, j] @ basis.
    """

    basis: FloatArray
    starts: FloatArray
    moves: FloatArray

    def at(self, rays: NDArray[np.intp] | slice, scales: FloatArray) -> Candidates:
        """Return rays at scales, each of the first at each of its own, (p, s)."""
        starts, moves = self.starts[rays, None], self.moves[rays, None]
        shares = starts + scales[:, :, None, None] * moves
        return Candidates(self.basis, shares.reshape(-1, *shares.shape[2:]))


@dataclass(frozen=True)
class ColludingAttack(Attack):
    """Send what harms most on many rays.

    Parameters
    ----------
    scales : increasing sequence of float
        How far along a ray is tried at first.
    places : int
        How many honest clients the colluders consider, those first whose vectors agree
        least with the mean.
    """

    scales: Sequence[float] = SCALES
    places: int = 8

    def __post_init__(self) -> None:
        check_grid("scales", self.scales, least=2)
        if self.places < 1:
            raise ValueError(f"places={self.places} must be at least 1")

    @abstractmethod
    def rays(self, honest: FloatArray, f: int) -> Rays:
        """Return the rays to search."""

    @abstractmethod
    def along(self, honest: FloatArray) -> FloatArray | None:
        """Return the way, (d,), that they want the aggregate to go; None: any."""

    def vectors(
        self,
        honest: FloatArray,
        f: int,
        rng: np.random.Generator,
        aggregate: Aggregate,
    ) -> FloatArray:
        """Return the worst vectors found, (f, d)."""
        check_finite(honest)
        rays, along = self.rays(honest, f), self.along(honest)
        count = len(rays.starts)
        grid = np.broadcast_to(self.scales, (count, len(self.scales)))
        first = rays.at(slice(None), grid)
        harm = harms(honest, first, f, aggregate, along)
        by_ray = harm.reshape(count, -1)
        best = np.argsort(-by_ray.max(axis=1), kind="stable")[:_REFINED]
        finer = self._between(by_ray[best].argmax(axis=1))
        second = rays.at(best, finer)
        more = harms(honest, second, f, aggregate, along)
        both = Candidates(rays.basis, np.vstack((first.shares, second.shares)))
        found = worst(honest, np.concatenate((harm, more)))
        return both.vectors(honest.mean(axis=0), found)

    def _between(self, best: NDArray[np.intp]) -> FloatArray:
        """Return scales about those of the grid that were best, (p, 2 _FINER)."""
        grid = np.asarray(self.scales)
        below, above = (
            grid[np.maximum(best - 1, 0)],
            grid[np.minimum(best + 1, len(grid) - 1)],
        )
        share = np.arange(1, _FINER + 1) / (_FINER + 1)
        down = below[:, None] + share * (grid[best] - below)[:, None]
        up = grid[best][:, None] + share * (above - grid[best])[:, None]
        return np.hstack((down, up))


@dataclass(frozen=True)
class MimicShift(ColludingAttack):
    """Stand where one honest client stands, and go from there.

    Client, direction and scale are searched in every step.

    Parameters
    ----------
    scales : increasing sequence of float
        Of the shift, in units of the honest root mean squared distance.
    places : int
        See `ColludingAttack`.
    directions : sequence of "mean", "deviation", "spectrum"
        The negated mean of the honest vectors, the standard deviations of their
        coordinates, the direction in which they vary most; of the last two the side
        that leads away from the mean.
    aim : "descent" or "distance"
        Whether to minimise the inner product of the aggregate with the honest mean, so
        that the loss falls least, or to maximise their distance.
    """

    directions: Sequence[Direction] = ("mean",)
    aim: Aim = "descent"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.directions or set(self.directions) - set(DIRECTIONS):
            raise ValueError(
                f"directions={self.directions} must name one or more of "
                f"{', '.join(DIRECTIONS)}"
            )
        if self.aim not in ("descent", "distance"):
            raise ValueError(f"aim={self.aim!r} must be descent or distance")

    def rays(self, honest: FloatArray, f: int) -> Rays:
        """Return every client with every direction."""
        shifts = _directions(honest, self.directions)
        return _rays(honest, f, _clients(honest, self.places), shifts)

    def along(self, honest: FloatArray) -> FloatArray | None:
        """Return the way up the loss, or None."""
        return _uphill(honest) if self.aim == "descent" else None


@dataclass(frozen=True)
class Drift(ColludingAttack):
    """Push the same way in every step of a run, from the mean or from a client.

    What a rule lets through once, it lets through every time, and momentum and model
    add it up.

    Parameters
    ----------
    scales, places
        As for `MimicShift`.
    seed : int
        Of the direction, the same in all steps.
    """

    seed: int = 0

    def rays(self, honest: FloatArray, f: int) -> Rays:
        """Return all places to stand, with the one direction."""
        shift = _radius(honest) * self.along(honest)
        places = [None, *_clients(honest, self.places)]
        return _rays(honest, f, places, shift[None])

    def along(self, honest: FloatArray) -> FloatArray:
        """Return the direction of the run, (d,)."""
        d = honest.shape[1]
        normal: FloatArray = np.random.default_rng(self.seed).normal(size=(d,))
        return np.asarray(normal / np.linalg.norm(normal))


@dataclass(frozen=True)
class Strongest(ColludingAttack):
    """In every step the worst of all families, for the rule that is attacked.

    The colluders stand at the mean or at an honest client, go any way of `MimicShift`,
    and send equal vectors or vectors that spread as the honest ones do. On these rays
    lie `FOE`, `SignFlip`, `Zero`, `Mimic`, `MimicShift`, and `ALIE`, `MinMax` and
    `MinSum` where they lead away from the mean. What counts is how little the loss
    falls.

    Parameters
    ----------
    scales, places
        As for `MimicShift`.
    """

    def rays(self, honest: FloatArray, f: int) -> Rays:
        """Return the families together."""
        shifts = _directions(honest, DIRECTIONS)
        places = [None, *_clients(honest, self.places)]
        equal = _rays(honest, f, places, shifts)
        # The j-th adversary adds what the j-th honest client is off the mean.
        own = np.eye(len(equal.basis))[np.arange(f) % len(honest)]
        return Rays(
            equal.basis,
            np.vstack((equal.starts, equal.starts + own)),
            np.vstack((equal.moves, equal.moves)),
        )

    def along(self, honest: FloatArray) -> FloatArray | None:
        """Return the way up the loss."""
        return _uphill(honest)


def _rays(
    honest: FloatArray, f: int, places: Sequence[int | None], shifts: FloatArray
) -> Rays:
    """Return a ray from each place, a client or the mean, along each shift, (s, d)."""
    h = len(honest)
    basis = np.vstack((honest - honest.mean(axis=0), shifts))
    unit = np.eye(len(basis))
    nowhere = np.zeros(len(basis))
    starts = [nowhere if place is None else unit[place] for place in places]
    pairs = [(start, move) for start in starts for move in unit[h:]]
    both = np.repeat(np.array(pairs)[:, :, None], f, axis=2)
    return Rays(basis, both[:, 0], both[:, 1])


def _clients(honest: FloatArray, count: int) -> list[int]:
    """Return the clients that agree least with the mean."""
    agreement = honest @ honest.mean(axis=0)
    return [int(i) for i in np.argsort(agreement, kind="stable")[:count]]


def _directions(honest: FloatArray, names: Sequence[Direction]) -> FloatArray:
    """Return the directions that lead away from the mean, (s, d), one radius long."""
    mean, radius = honest.mean(axis=0), _radius(honest)
    found = np.empty((len(names), honest.shape[1]))
    for direction, name in zip(found, names, strict=True):
        if name == "mean":
            direction[:] = mean
        elif name == "deviation":
            direction[:] = honest.std(axis=0)
        else:
            centred = honest - mean
            direction[:] = centred.T @ np.linalg.eigh(centred @ centred.T)[1][:, -1]
    lengths = np.linalg.norm(found, axis=1)
    sides = np.where(found @ mean > 0.0, -radius, radius)
    factors = np.divide(sides, lengths, out=np.zeros_like(lengths), where=lengths > 0.0)
    found *= factors[:, None]
    return found


def _radius(honest: FloatArray) -> float:
    """Return the root mean squared distance to the mean; of equal vectors, the norm."""
    mean = honest.mean(axis=0)
    radius = np.sqrt(np.square(honest - mean).sum(axis=1).mean())
    return float(radius) or float(np.linalg.norm(mean))


def _uphill(honest: FloatArray) -> FloatArray | None:
    """Return the unit vector against the honest mean; None if that is zero."""
    mean = honest.mean(axis=0)
    length = np.linalg.norm(mean)
    if not length:
        return None
    uphill: FloatArray = -mean / length
    return uphill
