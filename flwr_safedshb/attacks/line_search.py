"""Where colluders may stand, and which way they may go from there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.aggregation.rule import FloatArray
from flwr_safedshb.attacks.candidates import Candidates

Direction = Literal["mean", "gradient", "deviation", "spectrum"]
DIRECTIONS: tuple[Direction, ...] = ("mean", "gradient", "deviation", "spectrum")


@dataclass(frozen=True)
class Rays:
    """Rays from where the colluders may stand, each in one direction.

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

    def evaluate_at(self, rays: NDArray[np.intp], scales: FloatArray) -> Candidates:
        """Return the p s candidates on ray rays[i] at scales[i, :], (p, s)."""
        starts, moves = self.starts[rays, None], self.moves[rays, None]
        shares = starts + scales[:, :, None, None] * moves
        return Candidates(self.basis, shares.reshape(-1, *shares.shape[2:]))

    def add_spread_copies(self, h: int) -> "Rays":
        """Return these and the same for colluders who spread as the honest ones do.

        The j-th adversary adds what the j-th honest client, of h, is off the mean.
        """
        f = self.starts.shape[1]
        own = np.eye(len(self.basis))[np.arange(f) % h]
        starts = np.vstack((self.starts, self.starts + own))
        return Rays(self.basis, starts, np.vstack((self.moves, self.moves)))


def make_rays(
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


def farthest_clients(honest: FloatArray, way: FloatArray, count: int) -> list[int]:
    """Return the `count` clients that are farthest along a way, (d,)."""
    return [int(i) for i in np.argsort(-(honest @ way), kind="stable")[:count]]


def make_shifts(
    honest: FloatArray, uphill: FloatArray, names: Sequence[Direction]
) -> FloatArray:
    """Return shifts, (s, d), each one radius long and on the side of `uphill`.

    Parameters
    ----------
    honest : (h, d) array
    uphill : (d,) array
        Against the gradient, for "gradient".
    names : sequence of Direction
    """
    mean, size = honest.mean(axis=0), honest_radius(honest)
    found = np.empty((len(names), honest.shape[1]))
    for direction, name in zip(found, names, strict=True):
        if name == "mean":
            direction[:] = -mean
        elif name == "gradient":
            direction[:] = uphill
        elif name == "deviation":
            direction[:] = honest.std(axis=0)
        else:
            centred = honest - mean
            direction[:] = centred.T @ np.linalg.eigh(centred @ centred.T)[1][:, -1]
    lengths = np.linalg.norm(found, axis=1)
    sides = np.where(found @ uphill < 0.0, -size, size)
    # The negated mean leads against the mean, whatever the gradient is.
    sides[[name == "mean" for name in names]] = size
    factors = np.divide(sides, lengths, out=np.zeros_like(lengths), where=lengths > 0.0)
    found *= factors[:, None]
    return found


def honest_radius(honest: FloatArray) -> float:
    """Return the root mean squared distance to the mean; of equal vectors, the norm."""
    mean = honest.mean(axis=0)
    distance = np.sqrt(np.square(honest - mean).sum(axis=1).mean())
    return float(distance) or float(np.linalg.norm(mean))
