"""A client's randomness: its noise and its choice of batches.

`SecureRandomness` is what a deployment uses: nobody can seed it, and nobody who learns
a past output can compute another one. `SeededRandomness` repeats itself, so simulations
are reproducible. Whoever knows the seed can subtract the noise, so its runs are *not*
private, and say so through ``private = False``.

Formal guarantees
-----------------
- Every draw of `SecureRandomness` has a key of its own (`keystream`), so nothing can
  repeat one.
- Its Gaussian values are half the sum of four independent ones in float64: the same
  distribution, with the low-order bits that floating-point attacks read off blunted
  (Holohan and Braghin, "Secure Random Sampling in Differential Privacy", 2021). Four
  such sums share four draws, with the signs of an orthogonal matrix, which keeps them
  independent; what they still show jointly in low-order bits, `round_to_grid` removes.
- `round_to_grid` puts releases on a grid that does not depend on the data. Rounding is
  post-processing of the Gaussian mechanism, and each interval of the grid holds some
  2^25 values of the noise, so no value of the grid is out of reach for any data: the
  attack on which values can occur (Mironov, "On Significance of the Least Significant
  Bits for Differential Privacy", 2012) finds nothing.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from flwr_safedshb.privacy.randomness import keystream

# Bits of a released value below the noise's deviation: as many as float32 keeps.
_BITS = 24
# From so many values on, Box-Muller is faster than numpy's ziggurat.
_MIN_BOX_MULLER = 2**12


def round_to_grid(
    values: npt.NDArray[np.float64], std: float
) -> npt.NDArray[np.float64]:
    """Round to multiples of a power of two, at most ``std`` / 2^24, in place.

    Parameters
    ----------
    values : ndarray, shape (d,)
        Sums of private values and noise of deviation ``std``.
    std : float
        Above 0.
    """
    scale = 2.0 ** (_BITS + 1 - math.frexp(std)[1])
    values *= scale  # exact, and so is the way back
    np.rint(values, out=values)
    values *= 1.0 / scale
    return values


@runtime_checkable
class Randomness(Protocol):
    """A source of a client's noise and batches.

    Attributes
    ----------
    private : bool
        Whether outputs are unpredictable, which every privacy statement needs.
    """

    private: ClassVar[bool]

    def for_step(self, node: int, step: int) -> Randomness:
        """Return the source that ``node`` uses in ``step``."""
        ...

    def gaussian(self, size: int, std: float) -> npt.NDArray[np.float64]:
        """Return ``size`` independent draws of N(0, ``std``^2)."""
        ...

    def subset(self, population: int, size: int) -> npt.NDArray[np.int64]:
        """Return a uniform subset of ``range(population)`` with ``size`` members."""
        ...

    def poisson_subset(
        self, population: int, probability: float
    ) -> npt.NDArray[np.int64]:
        """Return the members of ``range(population)``, each kept independently."""
        ...

    def uniform(self, count: int) -> npt.NDArray[np.float64]:
        """Return ``count`` independent numbers, uniform in [0, 1)."""
        ...


class SecureRandomness:
    """Unpredictable randomness, the default; it takes no seed."""

    private: ClassVar[bool] = True

    def for_step(self, node: int, step: int) -> SecureRandomness:
        """Return itself: every draw is fresh anyway."""
        return self

    def gaussian(self, size: int, std: float) -> npt.NDArray[np.float64]:
        """Return ``size`` independent draws of N(0, ``std``^2)."""
        draws = keystream.normal(4 * -(-size // 4), std / 2.0)
        # Sums and differences of halves, twice over: Hadamard's matrix of four.
        noise = draws.reshape(2, 2, len(draws) // 4)
        sums = np.empty_like(noise)
        np.add(noise[0], noise[1], out=sums[0])
        np.subtract(noise[0], noise[1], out=sums[1])
        np.add(sums[:, 0], sums[:, 1], out=noise[:, 0])
        np.subtract(sums[:, 0], sums[:, 1], out=noise[:, 1])
        return draws[:size]

    def subset(self, population: int, size: int) -> npt.NDArray[np.int64]:
        """Return a uniform subset of ``range(population)`` with ``size`` members."""
        return keystream.subset(population, size)

    def poisson_subset(
        self, population: int, probability: float
    ) -> npt.NDArray[np.int64]:
        """Return the members of ``range(population)``, each kept independently."""
        return np.flatnonzero(keystream.uniform(population) < probability)

    def uniform(self, count: int) -> npt.NDArray[np.float64]:
        """Return ``count`` independent numbers, uniform in [0, 1)."""
        return keystream.uniform(count)


class SeededRandomness:
    """Reproducible randomness for simulations; a run that uses it is not private.

    Many values at once come in the precision of float32: their last bit may differ
    between processors, as that of a model's own gradients does.

    Parameters
    ----------
    seed : int
        At least 0.
    spawn_key : tuple of int
        Which of the independent sources with this seed.
    """

    private: ClassVar[bool] = False

    def __init__(self, seed: int, spawn_key: tuple[int, ...] = ()) -> None:
        if seed < 0:
            raise ValueError(f"seed={seed} must be at least 0")
        self._seed, self._spawn_key = seed, spawn_key

    @cached_property
    def _state(self) -> np.random.Generator:
        # Created when needed: most sources only derive those of their steps.
        sequence = np.random.SeedSequence(self._seed, spawn_key=self._spawn_key)
        return np.random.default_rng(sequence)

    def for_step(self, node: int, step: int) -> SeededRandomness:
        """Return the source that ``node`` uses in ``step``.

        It depends on (seed, node, step) and nothing else, so a client that is rebuilt
        for every message draws the same values on every engine.
        """
        if node < 0 or step < 0:
            raise ValueError(f"node={node} and step={step} must be at least 0")
        return SeededRandomness(self._seed, (node, step))

    def gaussian(self, size: int, std: float) -> npt.NDArray[np.float64]:
        """Return ``size`` independent draws of N(0, ``std``^2)."""
        if size >= _MIN_BOX_MULLER:
            return self._draw_box_muller(size, std)
        noise = self._state.standard_normal(size)
        noise *= std
        return noise

    def _draw_box_muller(self, size: int, std: float) -> npt.NDArray[np.float64]:
        """Draw as `gaussian`, by the Box-Muller transform, in a third of the time.

        A pair of values has the radius sqrt(-2 log u) and a uniform angle; u is in
        steps of 2^-32 and above 0, so radii reach 6.7.
        """
        bits = self._state.bit_generator.random_raw(-(-size // 2))
        radii, angles = bits.view(np.uint32).reshape(2, -1).astype(np.float32)
        radii += np.float32(0.5)
        radii *= np.float32(2.0**-32)
        np.log(radii, out=radii)
        radii *= np.float32(-2.0)
        np.sqrt(radii, out=radii)
        radii *= np.float32(std)
        angles *= np.float32(2.0 * math.pi * 2.0**-32)
        noise = np.empty((2, len(radii)))
        np.multiply(radii, np.cos(angles), out=noise[0])
        np.multiply(radii, np.sin(angles), out=noise[1])
        return noise.reshape(-1)[:size]

    def subset(self, population: int, size: int) -> npt.NDArray[np.int64]:
        """Return a uniform subset of ``range(population)`` with ``size`` members."""
        # The order carries no information a sum would keep, hence no shuffle.
        return self._state.choice(population, size, replace=False, shuffle=False)

    def poisson_subset(
        self, population: int, probability: float
    ) -> npt.NDArray[np.int64]:
        """Return the members of ``range(population)``, each kept independently."""
        return np.flatnonzero(self._state.random(population) < probability)

    def uniform(self, count: int) -> npt.NDArray[np.float64]:
        """Return ``count`` independent numbers, uniform in [0, 1)."""
        return self._state.random(count)
