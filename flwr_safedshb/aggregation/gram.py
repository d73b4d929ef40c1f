"""Gram matrix and weighted sum of the clients' vectors, streamed layer by layer.

A robust rule needs inner products only, so the server never stacks the replies: every
client stays a list of layers, and both passes below hold one block of `BLOCK_BYTES` at
a time. Products are accumulated in float64 on the raw vectors, so that one huge vector
cannot blur the products of the others.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Layers = Sequence[NDArray[np.floating]]
Clients = Sequence[Layers]

# One float64 block of all clients: small enough for a core's cache, large enough that
# call overheads do not show. With many clients it is n wide, so that adding to the
# n x n result costs no more than multiplying.
BLOCK_BYTES = 1 << 20


def blocks(clients: Clients) -> Iterator[tuple[int, slice, FloatArray]]:
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


def gram(clients: Clients, centre: int | None = None) -> FloatArray:
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
    for _, _, block in blocks(clients):
        if centre is not None:
            block -= block[centre].copy()
        total += block @ block.T
    return total


def squared_distances(gram: FloatArray) -> FloatArray:
    """Return squared distances between the vectors of Gram matrices, (..., n, n).

    What is below the round-off of the Gram matrix itself is returned as zero, so that
    equal vectors are seen to be equal.
    """
    squares = np.diagonal(gram, axis1=-2, axis2=-1)
    sums = squares[..., :, None] + squares[..., None, :]
    distances = sums - (gram + np.swapaxes(gram, -2, -1))
    distances[distances <= 8 * np.finfo(float).eps * sums] = 0.0
    distances[..., np.arange(gram.shape[-1]), np.arange(gram.shape[-1])] = 0.0
    return distances


def nearest_sums(distances: FloatArray, m: int) -> FloatArray:
    """Return for each vector the sum of its m smallest squared distances, (..., n).

    Its distance to itself, zero, is one of them.
    """
    sums: FloatArray = np.partition(distances, m - 1, axis=-1)[..., :m].sum(axis=-1)
    return sums


def outermost_first(distances: FloatArray, m: int) -> NDArray[np.intp]:
    """Order the vectors, (..., n), by distances to their m nearest, largest first.

    A function of the vectors, not of their order, ties aside. What is obviously hostile
    comes first.
    """
    return np.argsort(-nearest_sums(distances, m), axis=-1, kind="stable")


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
    for layer, span, block in blocks(chosen):
        flat[layer][span] = weights[used] @ block
    return result
