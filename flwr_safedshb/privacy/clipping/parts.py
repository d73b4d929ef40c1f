"""Gradients of k examples as the numbers that are summed: the kinds of `sums.Part`.

What a part measures is what it sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from flwr_safedshb.privacy.clipping.sums import lowered, squares, summed

# Elements that are worked on at a time: few, so that they stay in the cache.
_CACHED = 2**18

Spread = Callable[[slice], torch.Tensor]


class Held:
    """Gradients as they are, (k, n), one row for each example, of some parameters."""

    def __init__(self, rows: torch.Tensor, at: slice) -> None:
        self._rows, self._at = rows, at
        self.size = rows.shape[1]

    def squares(self, clip_norm: float) -> torch.Tensor:
        """Return the squared norms."""
        return squares(self._rows)

    def drop(self, examples: torch.Tensor) -> None:
        """Set the gradients of some examples to zero."""
        self._rows = self._rows.masked_fill(examples.unsqueeze(1), 0.0)

    def write(self, factors: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sums of the gradients times their factors."""
        rows = self._rows.view(*factors.shape, -1)
        summed(factors.unsqueeze(2), rows, out[:, self._at].unsqueeze(1))


class Outer:
    """Outer products of what came back, g, and what went in; g is that of a bias.

    Parameters
    ----------
    inputs, g : Tensor, shape (k, p) and (k, q)
    weight, bias : slice
        A layer without a bias has none.
    """

    def __init__(
        self, inputs: torch.Tensor, g: torch.Tensor, weight: slice, bias: slice | None
    ) -> None:
        self._inputs, self._g, self._weight, self._bias = inputs, g, weight, bias
        self.size = g.shape[1] * (inputs.shape[1] + (bias is not None))

    def squares(self, clip_norm: float) -> torch.Tensor:
        """Return the squared norms."""
        each = squares(self._inputs)
        if self._bias is not None:
            each += 1.0
        info = torch.finfo(self._g.dtype)
        if info.bits < 64:
            # f g may underflow, by up to the least number in each of q values, and is
            # then multiplied by the inputs. (Those of float64 have infinite squares.)
            limit = info.eps / 2.0 * lowered(clip_norm, 1, self._g.dtype) / info.tiny
            each.masked_fill_(each > limit**2 / self._g.shape[1], math.inf)
        return each.mul_(squares(self._g))

    def drop(self, examples: torch.Tensor) -> None:
        """Set the gradients of some examples to zero."""
        self._inputs = self._inputs.masked_fill(examples.unsqueeze(1), 0.0)
        self._g = self._g.masked_fill(examples.unsqueeze(1), 0.0)

    def write(self, factors: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sums of the gradients times their factors."""
        g = self._g.view(*factors.shape, -1) * factors.unsqueeze(2)
        inputs = self._inputs.view(*factors.shape, -1)
        weight = out[:, self._weight].view(len(out), g.shape[2], -1)
        summed(g, inputs, weight)
        if self._bias is not None:
            torch.sum(g, dim=1, dtype=out.dtype, out=out[:, self._bias])


def formed(spread: Spread, g: torch.Tensor, weight: slice, rows: torch.Tensor) -> Held:
    """Return gradients that are sums of outer products over positions.

    Parameters
    ----------
    spread : callable (examples: slice) -> Tensor, shape (k', channels, p, t)
        The inputs at every one of t positions, in separate channels.
    g : Tensor, shape (k, channels, q, t)
    weight : slice
    rows : Tensor, shape (k, n)
        Where the gradients are written.
    """
    gradients = rows.view(*g.shape[:3], -1)
    step = max(1, _CACHED // (gradients[0, :, 0].numel() * g.shape[3]))
    for start in range(0, len(g), step):
        some = slice(start, start + step)
        torch.matmul(g[some], spread(some).mT, out=gradients[some])
    return Held(rows, weight)


class Rows:
    """Gradients of a table's rows.

    Parameters
    ----------
    entries : Tensor of int, shape (k, t)
        The rows that were looked up.
    g : Tensor, shape (k, t, q)
    length : int
        Rows of the table.
    weight : slice
    """

    def __init__(
        self, entries: torch.Tensor, g: torch.Tensor, length: int, weight: slice
    ) -> None:
        self._length, self._weight, self._count = length, weight, len(g)
        self.size = length * g.shape[2]
        # Each example's own rows, added up before they are measured and summed.
        owners = torch.arange(len(g), device=g.device).unsqueeze(1)
        self._places, inverse = torch.unique(
            owners * length + entries, return_inverse=True
        )
        self._owners = self._places.div(length, rounding_mode="floor")
        self._g = g.new_zeros(len(self._places), g.shape[2], dtype=torch.float64)
        self._g.index_add_(0, inverse.flatten(), g.flatten(0, 1).double())

    def squares(self, clip_norm: float) -> torch.Tensor:
        """Return the squared norms."""
        found = self._g.new_zeros(self._count)
        return found.index_add_(0, self._owners, squares(self._g))

    def drop(self, examples: torch.Tensor) -> None:
        """Set the gradients of some examples to zero."""
        self._g = self._g.masked_fill(examples[self._owners].unsqueeze(1), 0.0)

    def write(self, factors: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sums of the gradients times their factors."""
        groups, count = factors.shape
        g = self._g * factors.flatten()[self._owners].unsqueeze(1)
        # From the row of an example to that of its group.
        shift = self._owners - self._owners.div(count, rounding_mode="floor")
        table = g.new_zeros(groups * self._length, g.shape[1])
        table.index_add_(0, self._places - shift * self._length, g)
        out[:, self._weight] = table.view(groups, -1)
