"""Gram matrix and weighted sum of the clients' vectors, streamed layer by layer.

A robust rule needs inner products only, so the server never stacks the replies: every
client stays a list of layers, and both passes below hold one block of `BLOCK_BYTES` at
a time. Products are accumulated in float64 on the raw vectors, so that one huge vector
cannot blur the products of the others.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, wraps
from typing import ParamSpec, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from flwr_safedshb.aggregation.rule import (
    Clients,
    FloatArray,
    Floats,
    Layers,
    Rule,
    Weighing,
)
from flwr_safedshb.aggregation.scatter import squared_distances
from flwr_safedshb.theory import check_num_malicious

P = ParamSpec("P")
R = TypeVar("R")

# One float64 block of all clients: small enough for a core's cache, large enough that
# call overheads do not show. With many clients it is n wide, so that adding to the
# n x n result costs no more than multiplying.
BLOCK_BYTES = 1 << 20
# Beyond this ratio of squared norm to squared distance a Gram matrix has lost more
# digits than the rules can spare (2^-52 * 1e4 = 2e-12).
CANCELLATION = 1e4
# Sizes of vectors whose squares keep all digits, and the longest that is let through.
SMALLEST, LARGEST, LONGEST = 2.0**-400, 2.0**400, 2.0**480
# What an inner product may be: sums of some of them must stay numbers.
LARGEST_PRODUCT = 1e300
# Gram matrices of up to so many vectors are decomposed faster than threads are limited.
_TINY = 16


class GramRule(Rule):
    """A rule that needs inner products only."""

    @abstractmethod
    def weigh(self, gram: FloatArray, f: int) -> Weighing:
        """Return the weights of the vectors whose Gram matrix, (n, n), is given."""

    def weigh_many(self, grams: FloatArray, f: int) -> FloatArray:
        """Return the weights, (g, n), for each of g Gram matrices, (g, n, n)."""
        return np.array([self.weigh(gram, f).weights for gram in grams])

    def aggregate(
        self, clients: Clients, f: int
    ) -> tuple[list[Floats], Weighing | None]:
        """Aggregate by Gram matrix, weights, weighted sum."""
        clients, exponent = scale_into_range(clients, f)
        rule = self.change_unit(-exponent) if exponent else self
        weighing = rule.weigh(centred_gram_matrix(clients, f), f)
        layers = weighted_sum(clients, weighing.weights)
        if exponent:
            layers = [scale_by_power(layer, exponent) for layer in layers]
            value, bound = weighing.lambda_max, weighing.lower_bound
            weighing = replace(
                weighing,
                lambda_max=float(scale_by_power(value, 2 * exponent)),
                lower_bound=bound and float(scale_by_power(bound, 2 * exponent)),
            )
        return layers, weighing

    def change_unit(self, exponent: int) -> Self:
        """Return the rule for vectors multiplied by 2^exponent.

        Most rules are scale-free; one with a scale of its own has to follow the unit.
        """
        return self


@cache
def _thread_controller() -> ThreadpoolController:
    return ThreadpoolController()


def single_threaded(function: Callable[P, R]) -> Callable[P, R]:
    """Run a method on a Gram matrix on one BLAS thread.

    Small eigenproblems are up to 30 times slower on two. Tiny ones run on one anyway.
    """

    @wraps(function)
    def run_limited(*args: P.args, **kwargs: P.kwargs) -> R:
        gram = args[1] if len(args) > 1 else None
        if isinstance(gram, np.ndarray) and gram.shape[-1] <= _TINY:
            return function(*args, **kwargs)
        with _thread_controller().limit(limits=1, user_api="blas"):
            return function(*args, **kwargs)

    return run_limited


def iterate_blocks(clients: Clients) -> Iterator[tuple[int, slice, FloatArray]]:
    """Yield float64 blocks of the same coordinates of every client.

    Yields
    ------
    layer, span, block
        The layer's position, the flat coordinates of it that the block covers, and an
        (n, k) array that is overwritten by the next step.
    """
    n = len(clients)
    width = max(n, BLOCK_BYTES // (8 * n))
    buffer = np.empty((n, width))
    for layer in range(len(clients[0])):
        rows = [np.ravel(client[layer]) for client in clients]
        for start in range(0, rows[0].size, width):
            span = slice(start, min(start + width, rows[0].size))
            # The whole buffer, or a compact copy of a narrower end: BLAS needs rows
            # without gaps to be fast.
            block = buffer.reshape(-1)[: n * (span.stop - start)].reshape(n, -1)
            for row, values in zip(block, rows, strict=True):
                row[:] = values[span]
            yield layer, span, block


def gram_matrix(clients: Clients, centre: int | None = None) -> FloatArray:
    """Return the inner products of the clients' vectors.

    Parameters
    ----------
    clients : n lists of layers
        The same shapes for every client.
    centre : int, optional
        Client whose vector is subtracted from all before multiplying.

    Returns
    -------
    (n, n) float64 array
    """
    total = np.zeros((len(clients), len(clients)))
    for _, _, block in iterate_blocks(clients):
        if centre is not None:
            block -= block[centre].copy()
        total += block @ block.T
    return total


def weighted_sum(clients: Clients, weights: FloatArray) -> list[NDArray[np.floating]]:
    """Return the layers of sum_i weights_i x_i, in the clients' own dtype.

    Clients of weight zero are not read.
    """
    used = np.flatnonzero(weights)
    chosen = [clients[int(i)] for i in used]
    if not chosen:
        return [np.zeros_like(layer) for layer in clients[0]]
    result = [np.empty_like(layer, order="C") for layer in clients[0]]
    flat = [layer.reshape(-1) for layer in result]
    for layer, span, block in iterate_blocks(chosen):
        flat[layer][span] = apply_without_overflow(
            weights[used].__matmul__, block, flat[layer].dtype
        )
    return result


def apply_without_overflow(
    function: Callable[[FloatArray], FloatArray],
    block: FloatArray,
    dtype: np.dtype[np.floating],
) -> FloatArray:
    """Apply a function that averages the rows of a block, (n, k), without overflow.

    Values above 2^1000, which no `dtype` below float64 has, are scaled down before it.
    """
    small = np.finfo(dtype).maxexp <= 1000
    if small or max(block.max(initial=0.0), -block.min(initial=0.0)) <= 2.0**1000:
        return function(block)
    return scale_by_power(function(np.ldexp(block, -64)), 64)


def scale_by_power(values: Floats | float, exponent: int) -> FloatArray:
    """Return values times 2^exponent, or the largest number where that overflows."""
    largest = np.finfo(np.asarray(values).dtype).max
    with np.errstate(over="ignore", under="ignore"):
        scaled: FloatArray = np.clip(np.ldexp(values, exponent), -largest, largest)
    return scaled


def scale_into_range(clients: Clients, f: int) -> tuple[Clients, int]:
    """Return the vectors divided by 2^k, so that squares keep their digits, and k.

    Only float64 has numbers that need it; otherwise k is 0 and the vectors are those
    given. Then no value of n - f vectors exceeds 2^400; of the other f, a vector with a
    value above 2^480 is shortened to that, in its direction.
    """
    if all(layer.dtype.itemsize < 8 for client in clients for layer in client):
        return clients, 0
    sizes = np.array([max_abs_value(client) for client in clients])
    typical = float(np.partition(sizes, len(sizes) - f - 1)[len(sizes) - f - 1])
    typical = typical or float(sizes.max())
    ordinary = typical == 0.0 or SMALLEST <= typical <= LARGEST
    exponent = 0 if ordinary else math.frexp(typical)[1]
    excess = np.frexp(sizes)[1] - exponent - math.frexp(LONGEST)[1] + 1
    shifts = -exponent - np.maximum(excess, 0)
    scaled = [
        [np.ldexp(layer, shift) for layer in client] if shift else client
        for client, shift in zip(clients, shifts.tolist(), strict=True)
    ]
    return scaled, exponent


def max_abs_value(client: Layers) -> float:
    """Return the largest absolute value of a vector."""
    return max(
        float(max(layer.max(initial=0.0), -layer.min(initial=0.0))) for layer in client
    )


def centred_gram_matrix(clients: Clients, f: int) -> FloatArray:
    """Return the Gram matrix, (n, n), centred until its inner products do not cancel.

    The centre is the client with n - f clients nearest around it: outliers cannot
    choose it, and no rule here can see a common translation. One centre may not be
    enough: where a common offset hides the gap between two clusters and that gap the
    spread of the larger one, the first centre may be in the smaller one.
    """
    total = check_finite_gram(gram_matrix(clients))
    while True:
        radii = np.partition(squared_distances(total), len(total) - f - 1, axis=1)
        radii = radii[:, len(total) - f - 1]
        centre = int(np.argmin(radii))
        # Distances from the last centre are exact, and two balls of n - f clients
        # meet. So from the second turn on a new centre has a radius that is smaller by
        # a factor of CANCELLATION / 4 or more, and the loop ends.
        if total[centre, centre] <= CANCELLATION * radii[centre]:
            return total
        total = check_finite_gram(gram_matrix(clients, centre))


def check_finite_gram(gram: FloatArray) -> FloatArray:
    """Return the Gram matrix, or raise a ValueError if its distances are no numbers."""
    if not np.abs(gram).max(initial=0.0) <= LARGEST_PRODUCT:
        fits = np.abs(np.diag(gram)) <= LARGEST_PRODUCT
        client = int(np.flatnonzero(~fits)[:1].sum())
        raise ValueError(
            f"the Gram matrix is not finite or has too large values (client {client}); "
            f"squared norms must stay below {LARGEST_PRODUCT:g}, so scale the vectors "
            "down or exclude that client"
        )
    return gram


def check_gram(gram: FloatArray, f: int) -> FloatArray:
    """Return a Gram matrix as float64, or raise a ValueError that says why not."""
    gram = np.asarray(gram, dtype=np.float64)
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1]:
        raise ValueError(f"gram has shape {gram.shape}; give an (n, n) array")
    check_num_malicious(len(gram), f)
    return check_finite_gram(gram)


def check_grams(grams: FloatArray, f: int) -> FloatArray:
    """Return Gram matrices, (g, n, n), or raise what `check_gram` raises."""
    if not np.abs(grams).max(initial=0.0) <= LARGEST_PRODUCT:
        return np.array([check_gram(gram, f) for gram in grams])
    for gram in grams[:1]:
        check_gram(gram, f)
    return grams
