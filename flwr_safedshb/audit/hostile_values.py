"""Hostile numbers: what a server may send as weights, or an example may hold."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

Rng = np.random.Generator
Shares = npt.NDArray[np.float64]
Family = Callable[[torch.Tensor, Rng], torch.Tensor]

# Patterns along an axis that nearly cancel: their sum is far below their terms, and a
# sum in float32 misses it.
_CANCELLING = (
    (2.0**24, 1.0, 1.0, -(2.0**24) - 2.0),
    (1.0, 2.0**-24, 2.0**-24, -1.0),
    (3.0, -1.0, -1.0, -1.0),
    (1.0, -1.0),
)


def odd_floats(dtype: torch.dtype) -> list[float]:
    """Return the values of a type at which arithmetic behaves unlike itself."""
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps  # the least denormal
    small = [0.0, least, info.tiny, info.tiny * (1 - info.eps), info.eps]
    large = [2.0**11, 2.0**24, info.max**0.5, info.max / 2, info.max, float("inf")]
    sizes = [*small, 1.0, 1 + info.eps, *large]
    return [*sizes, *(-size for size in sizes), float("nan")]


def _plain(like: torch.Tensor, rng: Rng) -> torch.Tensor:
    return like.clone()


def _scaled(like: torch.Tensor, rng: Rng) -> torch.Tensor:
    """Multiply by one power of two, from denormal to nearly infinite."""
    return like * _power(like.dtype, rng)


def _uneven(like: torch.Tensor, rng: Rng) -> torch.Tensor:
    """Multiply by another power of two at each place of an axis."""
    axis = int(rng.integers(like.dim()))
    powers = [_power(like.dtype, rng) for _ in range(like.shape[axis])]
    return like * _along(torch.tensor(powers, dtype=like.dtype), axis, like)


def _cancelling(like: torch.Tensor, rng: Rng) -> torch.Tensor:
    """Repeat one slice along an axis, with factors that cancel."""
    # Mostly a later one: the first has examples, or a layer's outputs.
    axis = min(int(rng.integers(like.dim() + 1)), like.dim() - 1)
    length = like.shape[axis]
    pattern = np.asarray(_CANCELLING[rng.integers(len(_CANCELLING))])
    factors = np.resize(pattern, length)
    if rng.random() < 0.5:  # once, and nothing elsewhere
        start = int(rng.integers(length))
        factors[np.arange(length) < start] = 0.0
        factors[np.arange(length) >= start + len(pattern)] = 0.0
        factors = np.roll(factors, -start % len(pattern))
    if rng.random() < 0.3:  # what is left over is not exactly nothing
        factors = factors * (1 + 2.0**-20 * rng.standard_normal(length))
    chosen = torch.from_numpy(factors).to(like.dtype)
    part = like.narrow(axis, int(rng.integers(length)), 1)
    if rng.random() < 0.6:  # products with powers of two are exact
        part = _power_of_two(part)
    return part * _along(chosen, axis, like) * _power(like.dtype, rng)


def _repeated(like: torch.Tensor, rng: Rng) -> torch.Tensor:
    """Repeat one slice along an axis."""
    axis = int(rng.integers(like.dim()))
    slice_ = like.narrow(axis, int(rng.integers(like.shape[axis])), 1)
    return slice_.expand_as(like).clone() * _power(like.dtype, rng)


def _constant(like: torch.Tensor, rng: Rng) -> torch.Tensor:
    return torch.full_like(like, _power(like.dtype, rng) * float(rng.choice([1, -1])))


def _zero(like: torch.Tensor, rng: Rng) -> torch.Tensor:
    return torch.zeros_like(like)


def _signs(like: torch.Tensor, rng: Rng) -> torch.Tensor:
    return torch.sign(like) * _power(like.dtype, rng)


def _sparse(like: torch.Tensor, rng: Rng) -> torch.Tensor:
    kept = torch.from_numpy(rng.random(tuple(like.shape)) < 0.2)
    return torch.where(kept, like, 0.0) * _power(like.dtype, rng)


def _odd(like: torch.Tensor, rng: Rng) -> torch.Tensor:
    """Put odd values in a few places."""
    values = torch.tensor(odd_floats(like.dtype), dtype=like.dtype)
    some = values[torch.from_numpy(rng.integers(len(values), size=tuple(like.shape)))]
    taken = torch.from_numpy(rng.random(tuple(like.shape)) < rng.choice([0.02, 0.5]))
    return torch.where(taken, some, like)


# Families, with how often each is drawn in two moods. Layers that are nothing or all
# the same everywhere leave the stage to the one that cancels.
_SHARES: dict[Family, tuple[float, float]] = {
    _plain: (0.15, 0.15),
    _scaled: (0.15, 0.0),
    _uneven: (0.1, 0.0),
    _cancelling: (0.15, 0.25),
    _repeated: (0.1, 0.05),
    _constant: (0.1, 0.2),
    _zero: (0.05, 0.35),
    _signs: (0.06, 0.0),
    _sparse: (0.04, 0.0),
    _odd: (0.1, 0.0),
}
_FAMILIES = list(_SHARES)
WILD, QUIET = (np.array(shares) for shares in zip(*_SHARES.values(), strict=True))


def hostile(like: torch.Tensor, rng: Rng, shares: Shares = WILD) -> torch.Tensor:
    """Return a tensor of the same shape and type out of a random family."""
    if like.numel() == 0 or like.dim() == 0:
        return like.clone()
    if not like.is_floating_point():
        return misplaced(like, rng)
    return _FAMILIES[rng.choice(len(_FAMILIES), p=shares)](like, rng)


def misplaced(like: torch.Tensor, rng: Rng) -> torch.Tensor:
    """Put classes or entries that do not exist in a few places of whole numbers."""
    if like.is_floating_point() or like.dtype == torch.bool:
        return like.clone()
    info = torch.iinfo(like.dtype)
    # One too many, less than nothing, the class that torch ignores, and far away.
    near = (min(int(like.max()), 99) + 1, 77, -1, -2, -100)
    values = torch.tensor([*near, 2**31, 2**40, info.max, info.min], dtype=like.dtype)
    some = values[torch.from_numpy(rng.integers(len(values), size=tuple(like.shape)))]
    share = rng.choice([0.0, 0.05, 0.5])
    taken = torch.from_numpy(rng.random(tuple(like.shape)) < share)
    return torch.where(taken, some, like)


def _power(dtype: torch.dtype, rng: Rng) -> float:
    """Return a power of two that the type holds, often a moderate one."""
    info = torch.finfo(dtype)
    low, high = np.log2(info.smallest_normal * info.eps), np.log2(info.max)
    width = rng.choice([0.02, 0.1, 0.3, 0.95])
    return float(2.0 ** np.round(rng.uniform(low * width, high * width)))


def _power_of_two(values: torch.Tensor) -> torch.Tensor:
    return torch.sign(values) * torch.exp2(torch.floor(torch.log2(values.abs())))


def _along(factors: torch.Tensor, axis: int, like: torch.Tensor) -> torch.Tensor:
    shape = [1] * like.dim()
    shape[axis] = -1
    return factors.view(shape)
