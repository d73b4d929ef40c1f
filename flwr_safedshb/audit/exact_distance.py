"""Distances compared with a bound without any rounding."""

from __future__ import annotations

import math
from fractions import Fraction

import torch

# Columns that are compared at a time, few enough for the processor's cache.
_PART = 2**16


def distance_ratios(
    one: torch.Tensor, other: torch.Tensor, bound: float
) -> list[float]:
    """Return `distance_ratio` of every row of two tensors, (rows, d)."""
    parts = zip(torch.split(one, _PART, 1), torch.split(other, _PART, 1), strict=True)
    norms = torch.stack(
        [
            torch.linalg.vector_norm(mine.double() - yours.double(), dim=1)
            for mine, yours in parts
        ]
    )
    ratios: list[float] = (torch.linalg.vector_norm(norms, dim=0) / bound).tolist()
    for row, ratio in enumerate(ratios):
        # Squares may have overflowed or underflowed where this is infinite or tiny.
        clear = 1e-100 < ratio < math.inf or torch.equal(one[row], other[row])
        if not clear or abs(ratio - 1.0) <= _rounding(one.shape[1]):
            ratios[row] = distance_ratio(one[row], other[row], bound)
    return ratios


def distance_ratio(one: torch.Tensor, other: torch.Tensor, bound: float) -> float:
    """Return |one - other| / bound for two tensors of one shape.

    Whether the result is above 1 is decided exactly: where float64 arithmetic is too
    close to 1 to tell, the squares are summed as fractions. A value that is not finite
    makes the result infinite.
    """
    one, other = one.detach().double(), other.detach().double()
    ratio = _norm(one - other) / bound
    if not math.isfinite(ratio):
        return math.inf
    if abs(ratio - 1.0) > _rounding(one.numel()):
        return ratio
    pairs = zip(one.flatten().tolist(), other.flatten().tolist(), strict=True)
    square = sum(((Fraction(a) - Fraction(b)) ** 2 for a, b in pairs), Fraction(0))
    above = square > Fraction(bound) ** 2
    return max(ratio, math.nextafter(1.0, 2.0)) if above else min(ratio, 1.0)


def _rounding(size: int) -> float:
    """Return more than the relative error of a norm of `size` values in float64."""
    return 2.0**-52 * (16 + size)


def _norm(difference: torch.Tensor) -> float:
    largest = float(difference.abs().max()) if difference.numel() else 0.0
    if largest == 0.0 or not math.isfinite(largest):
        return largest if largest == 0.0 else math.inf
    # Scaled, so that squares neither overflow nor underflow.
    return largest * float(torch.linalg.vector_norm(difference / largest))
