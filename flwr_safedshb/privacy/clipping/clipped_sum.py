"""Norms, clip factors and sums of per-example gradients, with the proof of the bound.

An example i contributes f_i x_i to the sum, where x_i holds *stored* floating-point
numbers (rows, or two vectors whose outer product it is) and f_i = min(1, C'/N_i). Where
persons are the unit (`ClippedGradients.per_owner`), an "example" here is a person: x_i
is the mean gradient of the person's examples. The promise is about the computed sum S,
the very numbers that get the noise:

    exchanging one example for another moves S by at most 2C, and leaving its place
    empty moves S by at most C, whatever the examples, the weights and the batch are.

Proof. Let N be the examples of a sum, n = min(N, BLOCK) those that are summed in one
type, u that type's unit roundoff (2^-24 for float32), v = 2^-53 that of float64, and
||.|| the Euclidean norm.

1. N_i >= ||x_i||: `squared_norms` is taken of the stored numbers that are summed,
   and is raised by more than its own rounding. f_i is rounded towards zero, so that
   ||f_i x_i|| <= C'. An example whose N_i is not finite is set to zero.
2. A coordinate of a block is a sum of n products in some order, with or without fused
   operations; a term passes at most n + 2 roundings. So its error is at most
   (n + 3) u sum_i f_i |x_i| (Higham, "Accuracy and Stability of Numerical Algorithms",
   2002, section 3.1), and the error of the block has norm at most (n + 3) n u C'.
3. Products that underflow, or are taken for zero where they would, add less than
   n u C' to it: an outer product for which they could add more than u C' is left out
   (`GradientPart`), and elsewhere C >= MIN_CLIP is far above the least number of the
   type. All products are at most C', so none overflows.
4. More than BLOCK examples are summed in blocks, and these in float64, or all at once
   in float64: by 2 and 3 with N and v, at most (N + 4) N v C' more. Blocks without the
   example are the same numbers in both sums; only their addition rounds otherwise.
5. Together the error E of what differs has ||E|| <= ((n + 4) n u + (N + 4) N v) C'.
   Exchanging an example moves S by at most 2 C' + 2 ||E||, leaving its place empty by
   C' + 2 ||E||. Both hold with

       C' = C / (1 + 2 (n + 4) n u + 2 (N + 4) N v),

   so rounding costs a share of C: 0.052 % for 64 examples in float32, 0.0086 % for 25,
   nothing to speak of in float64, the type for models of up to `WIDE` parameters.

6. Where x_i is a sum of r outer products g_j a_j^T (`GradientPart.rows`), it is not
   formed. Its norm is that of two matrices of products, Gram's, and its terms may be
   larger than it: let T_i = sum_j ||g_j|| ||a_j||. N_i is raised to at least T_i/R, for
   R = `bound_spread`, so that f_i T_i <= R C'. Then, with blocks of n' whole examples
   (`count_at_once`), 2 and 3 read (n' r + 3) u n' R C' + n' r u C', and 4 reads
   (N r + 4) N R v C'. Twice the sum of these is added to what divides C. The matrices
   are products of unit vectors in float64, so the square of the norm is wrong by less
   than (p + q + r^2 + 32) 2^-52 T_i^2, which is added to it.

How the numbers of x_i were rounded does not matter: what is measured is what is summed.
The proof assumes that they do not depend on another example (`backward`), and that the
same products in the same shapes round alike. So N must be the same with the example and
without it: an empty place is still a place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch

BLOCK = 64
WIDE = 4096
MIN_CLIP, MAX_CLIP = 2.0**-60, 2.0**60
# Squares that are summed in float32 before the sum goes on in float64.
_FLOAT32_SQUARES = 256
# The largest error of a float32 sum of outer products, in units of C.
_MAX_ROUNDING = 2.0**-9


@dataclass(eq=False)
class GradientPart:
    """The gradients of k examples for some of the parameters.

    Those of the parameters at `own`, such as a bias, are g, (k, q). Those of the
    parameters at `weight` are the outer products of g and `inputs`, (k, p). With r
    `rows` an example, these are (k r, q) and (k r, p), and an example's gradient is the
    sum over its rows.
    """

    g: torch.Tensor
    own: slice | None
    inputs: torch.Tensor | None = None
    weight: slice | None = None
    rows: int = 1

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(at.stop - at.start for at in (self.own, self.weight) if at)

    def squared_norms(self, clip_norm: float) -> torch.Tensor:
        """Return upper bounds of the squared norms, up to rounding in float64; (k,)."""
        if self.inputs is None:
            return squared_norms(self.g)
        each = squared_norms(self.inputs)
        if self.own is not None:
            each += 1.0
        info = torch.finfo(self.g.dtype)
        if info.bits < 64:
            # f g may underflow in each of q values, and is multiplied by the inputs.
            limit = (
                info.eps / 2.0 * lower_clip_norm(clip_norm, 1, self.g.dtype) / info.tiny
            )
            each.masked_fill_(each > limit**2 / self.g.shape[1], math.inf)
        if self.rows > 1:
            return self._squared_norms_of_sums(each, squared_norms(self.g))
        return each.mul_(squared_norms(self.g))

    def _squared_norms_of_sums(
        self, inputs_squared: torch.Tensor, g_squared: torch.Tensor
    ) -> torch.Tensor:
        """Return upper bounds of the squared norms of sums over rows (6), (k,).

        Parameters
        ----------
        inputs_squared, g_squared : Tensor, shape (k r,)
            The squared norms of rows, with 1 added to the first for a bias.
        """
        assert self.inputs is not None
        input_norms, g_norms = inputs_squared.sqrt(), g_squared.sqrt()
        parts = self.inputs / input_norms.unsqueeze(1), self.g / g_norms.unsqueeze(1)
        inputs, g = (part.view(-1, self.rows, part.shape[1]) for part in parts)
        products = torch.bmm(inputs, inputs.mT)
        if self.own is not None:
            ones = input_norms.reciprocal().view(-1, self.rows, 1)
            products += ones * ones.mT
        products *= torch.bmm(g, g.mT)
        sizes = (input_norms * g_norms).view(-1, self.rows, 1)
        found = (products * sizes * sizes.mT).sum(dim=(1, 2))
        terms = sizes.sum(dim=(1, 2)).square_()
        slack = (inputs.shape[2] + g.shape[2] + self.rows**2 + 32) * 2.0**-52
        found = torch.maximum(found, terms / bound_spread(self.rows) ** 2)
        return found.add_(terms, alpha=slack)

    def zero_examples(self, examples: torch.Tensor) -> None:
        """Set the gradients of some examples, (k,) of bool, to zero."""
        examples = repeat_each(examples, self.rows)
        self.g = _zero_rows(self.g, examples)
        if self.inputs is not None:
            self.inputs = _zero_rows(self.inputs, examples)

    def write_sums(
        self, factors: torch.Tensor, out: torch.Tensor, total_count: int
    ) -> None:
        """Write sum_i f_i x_i, f of shape (groups, k), to `out`, (groups, d)."""
        each = repeat_each(factors, self.rows).unsqueeze(2)
        g = self.g.view(*each.shape[:2], -1)
        if self.inputs is None:
            sum_outer_products(each, g, out[:, self.own].unsqueeze(1))
            return
        inputs, g = self.inputs.view(*each.shape[:2], -1), g * each
        sum_outer_products(
            g,
            inputs,
            out[:, self.weight].view(len(out), g.shape[2], -1),
            BLOCK
            if self.rows == 1
            else self.rows * count_at_once(total_count, self.rows),
        )
        if self.own is not None:
            torch.sum(g, dim=1, dtype=out.dtype, out=out[:, self.own])


class TablePart:
    """The gradients of k examples for a table.

    They are g, (k, t, q), for the rows `entries`, (k, t).
    """

    rows = 1

    def __init__(
        self, entries: torch.Tensor, g: torch.Tensor, length: int, weight: slice
    ) -> None:
        self._length, self._weight, self._count = length, weight, len(g)
        self.size = length * g.shape[2]
        # Each example's uses of a row are added up before they are measured and summed.
        owners = torch.arange(len(g), device=g.device).unsqueeze(1)
        self._keys, inverse = torch.unique(
            owners * length + entries, return_inverse=True
        )
        self._owners = self._keys.div(length, rounding_mode="floor")
        self._g = g.new_zeros(len(self._keys), g.shape[2], dtype=torch.float64)
        self._g.index_add_(0, inverse.flatten(), g.flatten(0, 1).double())

    def squared_norms(self, clip_norm: float) -> torch.Tensor:
        """Return the squared norms, up to rounding in float64; (k,)."""
        found = self._g.new_zeros(self._count)
        return found.index_add_(0, self._owners, squared_norms(self._g))

    def zero_examples(self, examples: torch.Tensor) -> None:
        """Set the gradients of some examples, (k,) of bool, to zero."""
        self._g = _zero_rows(self._g, examples[self._owners])

    def write_sums(
        self, factors: torch.Tensor, out: torch.Tensor, total_count: int
    ) -> None:
        """Write sum_i f_i x_i, f of shape (groups, k), to `out`, (groups, d)."""
        groups, count = factors.shape
        g = self._g * factors.flatten()[self._owners].unsqueeze(1)
        # From the row of an example to that of its group.
        shift = self._owners - self._owners.div(count, rounding_mode="floor")
        table = g.new_zeros(groups * self._length, g.shape[1])
        table.index_add_(0, self._keys - shift * self._length, g)
        out[:, self._weight] = table.view(groups, -1)


def clip_and_sum(
    parts: Sequence[GradientPart | TablePart],
    shape: tuple[int, int, int],
    clip_norm: float,
    dtype: torch.dtype,
    usable: torch.Tensor | None = None,
    total_count: int = 0,
) -> torch.Tensor:
    """Sum the clipped gradients of each group of examples.

    Parameters
    ----------
    parts : sequence of GradientPart or TablePart
        Of all groups, one after the other; a parameter without one has no gradient.
    shape : (groups, k, d)
        k examples in each group, d parameters in all.
    clip_norm : float
        C.
    dtype : torch.dtype
        Of the parts, and of the sum of a block.
    usable : Tensor of bool, shape (groups * k,), optional
        False for empty places.
    total_count : int
        N, if these are parts of larger sums.

    Returns
    -------
    Tensor, shape (groups, d)
        In `dtype`, or in float64 if a group is more than a block.
    """
    groups, count, size = shape
    rows = max((part.rows for part in parts), default=1)
    total_count = max(total_count, count)
    norms = reduce(torch.add, (part.squared_norms(clip_norm) for part in parts)).sqrt_()
    # Lowered by more than float64 rounds or underflows.
    bound = lower_clip_norm(clip_norm, total_count, dtype, rows)
    bound /= 1.0 + 2.0**-30 + size * 2.0**-50
    factors = bound / norms
    if dtype != torch.float64:
        factors = factors.to(dtype)
        factors = torch.nextafter(factors, factors.new_zeros(()))
    factors.clamp_(max=1.0)
    if usable is not None:
        factors.masked_fill_(~usable.to(norms.device), 0.0)
    if not math.isfinite(norms.sum()):
        # Zero times infinity is not zero.
        infinite = ~norms.isfinite()
        factors.masked_fill_(infinite, 0.0)
        for part in parts:
            part.zero_examples(infinite)
    make = torch.empty if sum(part.size for part in parts) == size else torch.zeros
    is_block = rows == 1 or total_count <= count_at_once(total_count, rows)
    wide = dtype if count <= BLOCK and is_block else torch.float64
    out = make(groups, size, dtype=wide, device=norms.device)
    for part in parts:
        part.write_sums(factors.view(groups, count), out, total_count)
    return out


def lower_clip_norm(
    clip_norm: float, count: int, dtype: torch.dtype, rows: int = 1
) -> float:
    """Return C': C lowered by the rounding of `count` examples of `rows` each."""
    n, u = float(min(count, BLOCK)), torch.finfo(dtype).eps / 2.0
    error = (n + 4.0) * n * u + (count + 4.0) * count * 2.0**-53
    if rows > 1:
        n, spread = float(count_at_once(count, rows)), bound_spread(rows)
        error += ((n * rows + 4.0) * n * spread + n * rows) * u
        error += (count * rows + 4.0) * count * spread * 2.0**-53
    return clip_norm / (1.0 + 2.0 * error)


def repeat_each(values: torch.Tensor, times: int) -> torch.Tensor:
    """Return values, each repeated along the last axis; no copy if that is once."""
    return values if times == 1 else values.repeat_interleave(times, dim=-1)


def bound_spread(rows: int) -> float:
    """Return R: how many times its clipped gradient the terms of an example may be.

    Terms that point into random directions are some sqrt(r) times as long as their sum.
    An example whose terms cancel more is clipped as if it were longer.
    """
    return 4.0 * math.sqrt(rows)


def count_at_once(count: int, rows: int) -> int:
    """Return n': of how many examples the outer products are summed in one type."""
    u = torch.finfo(torch.float32).eps / 2.0
    if (count * rows + 4.0) * count * bound_spread(rows) * u <= _MAX_ROUNDING:
        return count
    return max(1, BLOCK // rows)


def _zero_rows(rows: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """Set some rows to zero, in place where every row has its own memory."""
    if 0 in rows.stride():
        return rows.masked_fill(which.unsqueeze(1), 0.0)
    return rows.index_fill_(0, which.nonzero().flatten(), 0.0)


def squared_norms(rows: torch.Tensor) -> torch.Tensor:
    """Return an upper bound of every row's squared norm, up to rounding in float64.

    Those of long rows with values beyond 1e18 may be infinite: to look closer would
    take a time that depends on the values.

    Parameters
    ----------
    rows : Tensor, shape (k, n)
    """
    length = rows.shape[1]
    if rows.dtype == torch.float64 or length < 8 * _FLOAT32_SQUARES:
        return _float64_squared_norms(rows)
    full = length // _FLOAT32_SQUARES * _FLOAT32_SQUARES
    blocks = rows[:, :full].reshape(len(rows), -1, _FLOAT32_SQUARES)
    # A block's square is less than 2^-15 too small, up to squares that underflow.
    found: torch.Tensor = torch.linalg.vector_norm(blocks, dim=2).double()
    found = found.square_().sum(dim=1)
    found.mul_(1.0 + 2.0**-15).add_(length * torch.finfo(rows.dtype).tiny)
    return found.add_(_float64_squared_norms(rows[:, full:]))


def _float64_squared_norms(rows: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    # Squares that underflow may be multiplied by large ones (`GradientPart`).
    return norms.square_().add_(rows.shape[1] * torch.finfo(torch.float64).tiny)


def sum_outer_products(
    left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, block_size: int = BLOCK
) -> None:
    """Write sum_i left_i right_i^T of every group to `out`.

    Parameters
    ----------
    left, right : Tensor, shape (groups, k, q) and (groups, k, p)
    out : Tensor, shape (groups, q, p)
    """
    if left.dtype != torch.float64 and not _has_exact_float32():
        left, right = left.double(), right.double()
    if left.dtype != out.dtype:
        out.zero_()
        part = torch.empty_like(out, dtype=left.dtype)  # lest autocast make it narrow
        for start in range(0, left.shape[1], block_size):
            block = slice(start, start + block_size)
            out += torch.bmm(left[:, block].mT, right[:, block], out=part)
    elif len(out) == 1:
        torch.mm(left[0].mT, right[0], out=out[0])
    else:
        torch.bmm(left.mT, right, out=out)


def _has_exact_float32() -> bool:
    """Return whether matrix products of float32 are computed in full float32."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # set for one backend alone
        return False
