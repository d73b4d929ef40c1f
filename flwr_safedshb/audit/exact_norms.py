"""Norms of what was returned, compared with a bound without any rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch

# Values that are compared at a time.
_PART = 2**16


def ratio(tensors: Sequence[torch.Tensor], bound: float) -> float:
    """Return the norm of all tensors together in units of `bound`.

    Whether the result is above 1 is decided exactly: where float64 arithmetic is too
    close to 1 to tell, the squares are summed as fractions. A value that is not finite
    makes the result infinite.
    """
    return _decided(tensors, [torch.zeros(())] * len(tensors), bound)


def gaps(one: torch.Tensor, other: torch.Tensor, bound: float) -> list[float]:
    """Return `gap` of every row of two tensors of shape (rows, d)."""
    # In parts that stay in the cache: a model may have millions of weights.
    parts = zip(torch.split(one, _PART, 1), torch.split(other, _PART, 1), strict=True)
    norms = torch.stack(
        [
            torch.linalg.vector_norm(mine.double() - yours.double(), dim=1)
            for mine, yours in parts
        ]
    )
    quick: list[float] = (torch.linalg.vector_norm(norms, dim=0) / bound).tolist()
    for row, found in enumerate(quick):
        # Squares may have overflown or vanished where this is infinite or tiny.
        clear = 1e-100 < found < math.inf or torch.equal(one[row], other[row])
        if not clear or abs(found - 1.0) <= _close(one.shape[1]):
            quick[row] = gap([one[row]], [other[row]], bound)
    return quick


def gap(
    one: Sequence[torch.Tensor], other: Sequence[torch.Tensor], bound: float
) -> float:
    """Return the norm of the difference in units of `bound`, as `ratio` does."""
    return _decided(one, other, bound)


def _decided(
    one: Sequence[torch.Tensor], other: Sequence[torch.Tensor], bound: float
) -> float:
    total = 0.0
    for mine, yours in zip(one, other, strict=True):
        total = math.hypot(total, _norm(mine, yours))
    found = total / bound
    if not math.isfinite(found):
        return math.inf
    if abs(found - 1.0) > _close(sum(part.numel() for part in one)):
        return found
    square = sum(
        (_square(mine, yours) for mine, yours in zip(one, other, strict=True)),
        Fraction(0),
    )
    above = square > Fraction(bound) ** 2
    return max(found, math.nextafter(1.0, 2.0)) if above else min(found, 1.0)


def _close(size: int) -> float:
    # A norm of d values in float64 is off by less than d roundings, and some more.
    return 2.0**-52 * (16 + size)


def _norm(one: torch.Tensor, other: torch.Tensor) -> float:
    difference = one.detach().double() - other.double()
    largest = float(difference.abs().max()) if difference.numel() else 0.0
    if largest == 0.0 or not math.isfinite(largest):
        return largest if largest == 0.0 else math.inf
    # Scaled, lest squares overflow or vanish.
    return largest * float(torch.linalg.vector_norm(difference / largest))


def _square(one: torch.Tensor, other: torch.Tensor) -> Fraction:
    pairs = zip(
        one.detach().double().flatten().tolist(),
        other.double().expand_as(one).flatten().tolist(),
        strict=True,
    )
    return sum(((Fraction(a) - Fraction(b)) ** 2 for a, b in pairs), Fraction(0))
