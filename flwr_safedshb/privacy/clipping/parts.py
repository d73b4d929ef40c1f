"""Gradients of k examples for one parameter: their norms, and their weighted sum.

Whether the gradients themselves are ever formed is a part's own choice, by what is
cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Protocol, cast

import torch
from torch import nn

# float32 sums of more squares than this lose digits of the norm.
_SQUARES = 4096
# Elements that are worked on at a time: few, so that they stay in the cache.
_BLOCK = 2**18
# Elements of gradients that are kept until their factors are known (64 MiB of float32).
MAX_KEPT = 2**24


class Part(Protocol):
    """One parameter's gradients of k examples."""

    def norms(self) -> torch.Tensor:
        """Return the norm of every example's gradient, float64, (k,)."""
        ...

    def weighted(self, factors: torch.Tensor) -> torch.Tensor:
        """Return the sum of the gradients times k factors, of the weight's shape."""
        ...


class Rooms:
    """Memory for gradients that must be formed, one room for each layer.

    It stays from step to step: new memory costs more than what is done in it.
    """

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}

    def room(
        self, layer: nn.Module, count: int, like: torch.Tensor
    ) -> torch.Tensor | None:
        """Return room for so many gradients of a layer's weight, (count, size).

        None if all layers together would take more than `MAX_KEPT`.
        """
        needed = count * cast(torch.Tensor, layer.weight).numel()
        room = self._kept.get(id(layer))
        if room is None or len(room) < needed:
            self._kept.pop(id(layer), None)
            if needed + sum(map(len, self._kept.values())) > MAX_KEPT:
                return None
            room = self._kept[id(layer)] = like.new_empty(needed)
        return room[:needed].view(count, -1)


class Held:
    """The examples' gradients as an array, (k, ...), that was already computed."""

    def __init__(self, gradients: torch.Tensor) -> None:
        self._gradients = gradients

    def norms(self) -> torch.Tensor:
        """Return the norm of every example's gradient, float64, (k,)."""
        return _row_norms(self._gradients)

    def weighted(self, factors: torch.Tensor) -> torch.Tensor:
        """Return the sum of the gradients times k factors."""
        return _combined(self._gradients, factors)


class Outer:
    """Outer products g a^T of inputs, (k, p), and what came back, (k, q)."""

    def __init__(self, inputs: torch.Tensor, g: torch.Tensor) -> None:
        self._inputs, self._g = inputs, g

    def norms(self) -> torch.Tensor:
        """Return the norm of every example's gradient, float64, (k,)."""
        return _row_norms(self._inputs) * _row_norms(self._g)

    def weighted(self, factors: torch.Tensor) -> torch.Tensor:
        """Return the sum of the gradients times k factors."""
        return (self._g * factors.to(self._g.dtype).unsqueeze(1)).T @ self._inputs


class Products:
    """Sums of outer products over positions: sum_l g_l a_l^T, in separate groups.

    Parameters
    ----------
    spread : callable (examples: slice) -> Tensor, shape (k', groups, p, l)
        The inputs at every position.
    g : Tensor, shape (k, groups, q, l)
    size : int
        p.
    plain : callable (Tensor like g) -> Tensor
        The sum of the gradients over examples.
    room : callable () -> Tensor of shape (k, groups q p), or None
        Where gradients are kept if they must be formed; without it they are formed
        and dropped.
    """

    def __init__(
        self,
        spread: Callable[[slice], torch.Tensor],
        g: torch.Tensor,
        size: int,
        plain: Callable[[torch.Tensor], torch.Tensor],
        room: Callable[[], torch.Tensor | None],
    ) -> None:
        self._spread, self._g, self._size, self._plain = spread, g, size, plain
        _, _, outputs, positions = g.shape
        # In multiplications, as measured: forming a gradient costs its memory, twelve
        # for each element, and all over again unless it is kept; float64 counts twice.
        measured = 4 * positions**2 * (size + outputs)
        formed = 12 * size * outputs
        self._room = room() if formed < measured else None
        if self._room is None:
            formed += positions * size * outputs
        self._form = formed < measured

    def norms(self) -> torch.Tensor:
        """Return the norm of every example's gradient, float64, (k,)."""
        measure = self._formed if self._form else self._measured
        norms = torch.cat([measure(examples) for examples in self._blocks()])
        if self._room is not None:
            del self._spread, self._g, self._plain  # and what they hold
        return norms

    def _blocks(self) -> Iterator[slice]:
        count, groups, outputs, positions = self._g.shape
        each = groups * (positions * self._size + outputs * self._size)
        step = _BLOCK // each or 1
        for start in range(0, count, step):
            yield slice(start, start + step)

    def _measured(self, examples: slice) -> torch.Tensor:
        # ||sum_l g_l a_l^T||^2 = sum_lm <g_l, g_m> <a_l, a_m>; in float64, because in
        # float32 squares of small values vanish and the sum cancels.
        a, g = self._spread(examples).double(), self._g[examples].double()
        squares = torch.einsum("kjlm,kjlm->k", a.mT @ a, g.mT @ g)
        return squares.clamp_(min=0.0).sqrt_()

    def _formed(self, examples: slice) -> torch.Tensor:
        g, a = self._g[examples], self._spread(examples).mT
        out = None
        if self._room is not None:
            out = self._room[examples].view(*g.shape[:3], a.shape[3])
        return row_norms(torch.matmul(g, a, out=out))

    def weighted(self, factors: torch.Tensor) -> torch.Tensor:
        """Return the sum of the gradients times k factors."""
        if self._room is not None:
            return _combined(self._room, factors)
        return self._plain(self._g * factors.to(self._g.dtype)[:, None, None, None])


class Rows:
    """Gradients of a table's rows.

    Parameters
    ----------
    entries : Tensor of int, shape (k, l)
        The rows that were looked up.
    g : Tensor, shape (k, l, q)
    layer : nn.Embedding
    """

    def __init__(
        self, entries: torch.Tensor, g: torch.Tensor, layer: nn.Embedding
    ) -> None:
        owners = torch.arange(len(g), device=g.device).unsqueeze(1).expand_as(entries)
        # The row of the padding has no gradient.
        kept = entries != (-1 if layer.padding_idx is None else layer.padding_idx)
        self._entries, self._owners, self._g = entries[kept], owners[kept], g[kept]
        self._count, self._shape = len(g), layer.weight.shape

    def norms(self) -> torch.Tensor:
        """Return the norm of every example's gradient, float64, (k,)."""
        pairs = self._owners * self._shape[0] + self._entries
        rows, places = torch.unique(pairs, return_inverse=True)
        g = self._g.double()
        gradients = g.new_zeros(len(rows), self._shape[1]).index_add_(0, places, g)
        squares = g.new_zeros(self._count)
        owners = rows.div(self._shape[0], rounding_mode="floor")
        return squares.index_add_(0, owners, gradients.square_().sum(dim=1)).sqrt_()

    def weighted(self, factors: torch.Tensor) -> torch.Tensor:
        """Return the sum of the gradients times k factors."""
        g = self._g * factors.to(self._g.dtype)[self._owners].unsqueeze(1)
        return g.new_zeros(self._shape).index_add_(0, self._entries, g)


def row_norms(gradients: torch.Tensor) -> torch.Tensor:
    """L2 norm of every example's gradient.

    Parameters
    ----------
    gradients : Tensor, shape (k, ...)
        Gradients of k examples for one parameter.

    Returns
    -------
    Tensor of float64, shape (k,)
    """
    flat = gradients.flatten(1)
    full = flat.shape[1] // _SQUARES * _SQUARES
    norms: torch.Tensor = torch.linalg.vector_norm(flat[:, full:], dim=1).double()
    if full:
        blocks = torch.unflatten(flat[:, :full], 1, (full // _SQUARES, _SQUARES))
        parts = torch.linalg.vector_norm(blocks, dim=2).double()
        norms = torch.hypot(norms, torch.linalg.vector_norm(parts, dim=1))
    if not math.isfinite(norms.sum()):
        # Finite values whose squares are not: only a wider type can tell.
        overflow = ~norms.isfinite()
        norms[overflow] = torch.linalg.vector_norm(flat[overflow].double(), dim=1)
    return norms


def _row_norms(gradients: torch.Tensor) -> torch.Tensor:
    # In float64: in float32 squares of small values vanish.
    flat = gradients.flatten(1).double()
    norms: torch.Tensor = torch.linalg.vector_norm(flat, dim=1)
    return norms


def _combined(gradients: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return factors.to(gradients.dtype) @ gradients.flatten(1)
