"""Tilted loss distributions and their convolution, with a bound on their errors.

Numerics, all on the pessimistic side
-------------------------------------
- Transforms: an FFT of size N has a relative error in the 2-norm of at most log2(N)
  times some 7 units of rounding (Higham, "Accuracy and Stability of Numerical
  Algorithms", Theorem 24.2). Its growth under the power T is bounded for each frequency
  by |A^T - B^T| <= T |A - B| max(|A|, |B|)^(T-1).
- Wrapping around: a mass beyond the end of the window appears inside it, which only
  adds. How much is missing where it belongs is bounded by the moments (Chernoff).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flwr_safedshb.privacy.accounting.privacy_loss import Floats, Integers

# A window may leave out e^-MARGIN of a tilted distribution on either side.
MARGIN = 30.0
# The most points of a transform; with so many it takes a second.
_MAX_SIZE = 2**22
_ROUNDING = 4 * float(np.finfo(float).eps)


@dataclass(frozen=True)
class TiltedDistribution:
    """A tilted distribution of losses.

    Attributes
    ----------
    points : ndarray of int64, shape (k,)
        In multiples of ``spacing``.
    masses : ndarray, shape (k,)
    error : float
        Bound on how much a mass may be underestimated.
    missing : float
        Mass that is at no point.
    """

    spacing: float
    points: Integers
    masses: Floats
    error: float = 0.0
    missing: float = 0.0


def convolve(
    parts: Sequence[tuple[TiltedDistribution, int]], first: float, last: float
) -> TiltedDistribution:
    """Convolve each distribution with itself, `count` times, and all with each other.

    Parameters
    ----------
    parts : sequence of (TiltedDistribution, int)
        Distributions of one spacing, and their counts.
    first, last : float
        The ends of a window that holds the result, in losses.
    """
    spacing = parts[0][0].spacing
    start = math.floor(first / spacing)
    size = 2 ** math.ceil(math.log2(math.ceil(last / spacing) - start + 1))
    if size > _MAX_SIZE:
        raise ArithmeticError(f"a transform of {size} points")
    rounding = _ROUNDING * math.log2(size)
    logarithm = np.zeros(size // 2 + 1, complex)
    reached = np.zeros(size // 2 + 1)
    transforms = []
    for part, count in parts:
        masses = np.asarray(np.bincount(part.points % size, part.masses, size), float)
        transform = np.fft.rfft(masses)
        error = rounding * float(np.linalg.norm(masses))
        # No Fourier coefficient exceeds the total mass.
        reach = np.minimum(np.abs(transform) + error * math.sqrt(size), masses.sum())
        logarithm += count * np.log(np.where(transform == 0, 1e-300, transform))
        reached += count * np.log(reach)
        transforms.append((count, error, reach))
    masses = np.fft.irfft(np.exp(logarithm), size)
    error = rounding * float(np.linalg.norm(masses))
    for (count, norm, reach), (part, _) in zip(transforms, parts, strict=True):
        others = np.exp(reached - np.log(reach))
        error += count * norm * math.sqrt(2 * float(others @ others) / size)
        error += count * 4 * _ROUNDING * 2 * float(np.exp(reached).sum()) / size
        error += count * part.error
    missing = math.exp(-MARGIN) + sum(count * part.missing for part, count in parts)
    points = start + np.arange(size)
    return TiltedDistribution(
        spacing, points, np.maximum(masses, 0.0)[points % size], error, missing
    )


def convolve_grids(
    parts: Sequence[TiltedDistribution], tilt: float
) -> TiltedDistribution:
    """Convolve the losses of different plans on the coarsest of their grids."""
    if len(parts) == 1:
        return parts[0]
    spacing = max(part.spacing for part in parts)
    coarse = [(coarsen_grid(part, spacing, tilt), 1) for part in parts]
    first = sum(float(part.points[0]) for part, _ in coarse)
    last = sum(float(part.points[-1]) for part, _ in coarse)
    return convolve(coarse, first * spacing, last * spacing)


def coarsen_grid(
    part: TiltedDistribution, spacing: float, tilt: float
) -> TiltedDistribution:
    """Move each mass to the two points around it on a coarser grid."""
    ratio = round(spacing / part.spacing)
    if ratio == 1:
        return part
    below, offsets = np.divmod(part.points, ratio)
    start, cells = int(below[0]), int(below[-1] - below[0]) + 2
    below -= start
    beyond = offsets * part.spacing
    share = np.expm1(-beyond) / math.expm1(-spacing)
    up = share * np.exp(tilt * (spacing - beyond))
    down = (1 - share) * np.exp(-tilt * beyond)

    ways = ((below, down), (below + 1, up))
    masses = np.add(*(np.bincount(to, way * part.masses, cells) for to, way in ways))
    most = sum(float(np.bincount(to, way, cells).max()) for to, way in ways)
    points = start + np.arange(cells)
    return TiltedDistribution(spacing, points, masses, part.error * most, part.missing)
