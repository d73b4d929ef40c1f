"""Draw hostile values for weights and examples."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

Rng = np.random.Generator
Shares = npt.NDArray[np.float64]
Family = Callable[[torch.Tensor, Rng], torch.Tensor]

# Patterns along an axis that nearly cancel: the sum is far smaller than its terms, and
# float32 arithmetic loses it.
_CANCELLING = (
    (2.0**24, 1.0, 1.0, -(2.0**24) - 2.0),
    (1.0, 2.0**-24, 2.0**-24, -1.0),
    (3.0, -1.0, -1.0, -1.0),
    (1.0, -1.0),
)


def draw_hostile(
    like: torch.Tensor, rng: Rng, shares: Shares | None = None
) -> torch.Tensor:
    """Return a tensor of the same shape and type from a random family.

    Parameters
    ----------
    like : Tensor
        The tensor that most families modify.
    rng : Generator
    shares : ndarray, shape (families,)
        How often to draw each family: `WILD` (the default) or `QUIET`.
    """
    if like.numel() == 0 or like.dim() == 0:
        return like.clone()
    if not like.is_floating_point():
        return misplace_indices(like, rng)
    shares = WILD if shares is None else shares
    return _FAMILIES[rng.choice(len(_FAMILIES), p=shares)](like, rng)


def misplace_indices(like: torch.Tensor, rng: Rng) -> torch.Tensor:
    """Replace a few integers by classes or table entries that do not exist."""
    if like.is_floating_point() or like.dtype == torch.bool:
        return like.clone()
    info = torch.iinfo(like.dtype)
    # One too large, negative, the class index that torch ignores, and far too large.
    near = (min(int(like.max()), 99) + 1, 77, -1, -2, -100)
    values = torch.tensor([*near, 2**31, 2**40, info.max, info.min], dtype=like.dtype)
    chosen = values[torch.from_numpy(rng.integers(len(values), size=tuple(like.shape)))]
    share = rng.choice([0.0, 0.05, 0.5])
    replaced = torch.from_numpy(rng.random(tuple(like.shape)) < share)
    return torch.where(replaced, chosen, like)


def edge_floats(dtype: torch.dtype) -> list[float]:
    """Return the values of a type where arithmetic rounds, underflows or overflows."""
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps  # the least denormal
    small = [0.0, least, info.tiny, info.tiny * (1 - info.eps), info.eps]
    large = [2.0**11, 2.0**24, info.max**0.5, info.max / 2, info.max, float("inf")]
    sizes = [*small, 1.0, 1 + info.eps, *large]
    return [*sizes, *(-size for size in sizes), float("nan")]


def _scale_axis(like: torch.Tensor, rng: Rng) -> torch.Tensor:
    """Multiply each slice along an axis by a power of two of its own."""
    axis = int(rng.integers(like.dim()))
    powers = [_draw_power(like.dtype, rng) for _ in range(like.shape[axis])]
    return like * _along(torch.tensor(powers, dtype=like.dtype), axis, like)


def _cancel(like: torch.Tensor, rng: Rng) -> torch.Tensor:
    """Repeat one slice along an axis, with factors that cancel."""
    # Mostly a later axis: the first is that of examples, or of a layer's outputs.
    axis = min(int(rng.integers(like.dim() + 1)), like.dim() - 1)
    length = like.shape[axis]
    pattern = np.asarray(_CANCELLING[rng.integers(len(_CANCELLING))])
    factors = np.resize(pattern, length)
    if rng.random() < 0.5:  # the pattern once, and zero elsewhere
        start = int(rng.integers(length))
        factors[np.arange(length) < start] = 0.0
        factors[np.arange(length) >= start + len(pattern)] = 0.0
        factors = np.roll(factors, -start % len(pattern))
    if rng.random() < 0.3:  # so that the remainder is not exactly zero
        factors = factors * (1 + 2.0**-20 * rng.standard_normal(length))
    chosen = torch.from_numpy(factors).to(like.dtype)
    part = like.narrow(axis, int(rng.integers(length)), 1)
    if rng.random() < 0.6:  # products with powers of two are exact
        part = torch.sign(part) * torch.exp2(torch.floor(torch.log2(part.abs())))
    return part * _along(chosen, axis, like) * _draw_power(like.dtype, rng)


def _repeat_slice(like: torch.Tensor, rng: Rng) -> torch.Tensor:
    axis = int(rng.integers(like.dim()))
    part = like.narrow(axis, int(rng.integers(like.shape[axis])), 1)
    return part.expand_as(like).clone() * _draw_power(like.dtype, rng)


def _fill(like: torch.Tensor, rng: Rng) -> torch.Tensor:
    power = _draw_power(like.dtype, rng)
    return torch.full_like(like, power * float(rng.choice([1, -1])))


def _thin_out(like: torch.Tensor, rng: Rng) -> torch.Tensor:
    kept = torch.from_numpy(rng.random(tuple(like.shape)) < 0.2)
    return torch.where(kept, like, 0.0) * _draw_power(like.dtype, rng)


def _put_edges(like: torch.Tensor, rng: Rng) -> torch.Tensor:
    """Put values from `edge_floats` in a few places."""
    values = torch.tensor(edge_floats(like.dtype), dtype=like.dtype)
    chosen = values[torch.from_numpy(rng.integers(len(values), size=tuple(like.shape)))]
    taken = torch.from_numpy(rng.random(tuple(like.shape)) < rng.choice([0.02, 0.5]))
    return torch.where(taken, chosen, like)


# Families, and their probabilities under WILD and under QUIET. Quiet tensors are mostly
# zero or constant, so that one which cancels dominates.
_SHARES: tuple[tuple[Family, float, float], ...] = (
    (lambda like, rng: like.clone(), 0.15, 0.15),
    (lambda like, rng: like * _draw_power(like.dtype, rng), 0.15, 0.0),
    (_scale_axis, 0.1, 0.0),
    (_cancel, 0.15, 0.25),
    (_repeat_slice, 0.1, 0.05),
    (_fill, 0.1, 0.2),
    (lambda like, rng: torch.zeros_like(like), 0.05, 0.35),
    (lambda like, rng: torch.sign(like) * _draw_power(like.dtype, rng), 0.06, 0.0),
    (_thin_out, 0.04, 0.0),
    (_put_edges, 0.1, 0.0),
)
_FAMILIES = [family for family, _, _ in _SHARES]
WILD = np.array([wild for _, wild, _ in _SHARES])
QUIET = np.array([quiet for _, _, quiet in _SHARES])


def _draw_power(dtype: torch.dtype, rng: Rng) -> float:
    """Return a power of two that the type holds, often a moderate one."""
    info = torch.finfo(dtype)
    low, high = np.log2(info.smallest_normal * info.eps), np.log2(info.max)
    width = rng.choice([0.02, 0.1, 0.3, 0.95])
    return float(2.0 ** np.round(rng.uniform(low * width, high * width)))


def _along(factors: torch.Tensor, axis: int, like: torch.Tensor) -> torch.Tensor:
    """Reshape factors, (length,), so that they multiply along an axis of `like`."""
    shape = [1] * like.dim()
    shape[axis] = -1
    return factors.view(shape)
