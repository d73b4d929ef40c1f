"""Unpredictable numbers: OpenSSL's AES in counter mode, under a new key for each draw.

Formal guarantees
-----------------
- Every call has its own 128-bit key out of the operating system's entropy, and no state
  outlives a call: a forked process, a copied or an unpickled object cannot repeat one,
  and whoever learns all of a call's numbers learns nothing of another's.
- `subset` and `integers` are exactly uniform; `normal` differs from the Gaussian by the
  rounding of float64.
"""

from __future__ import annotations

import math
import os

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES128
from cryptography.hazmat.primitives.ciphers.modes import CTR

_BLOCK_BYTES = 16
# Kept, because to allocate them takes as long as to encrypt them.
_ZEROS = bytes(2**20)
# A bit less than pi / 4, the share of a square that its circle covers.
_INSIDE = 0.78


def words(count: int) -> npt.NDArray[np.uint64]:
    """Return ``count`` uniform 64-bit integers."""
    size = 8 * count
    # OpenSSL needs room for one more block than it encrypts.
    stream = np.empty(size + _BLOCK_BYTES, np.uint8)
    zeros = memoryview(_ZEROS)[:size] if size <= len(_ZEROS) else bytes(size)
    cipher = Cipher(AES128(os.urandom(_BLOCK_BYTES)), CTR(bytes(_BLOCK_BYTES)))
    cipher.encryptor().update_into(zeros, stream.data)
    return stream[:size].view(np.uint64)


def integers(bound: int, count: int) -> npt.NDArray[np.int64]:
    """Return ``count`` uniform integers in ``range(bound)``, 0 < ``bound`` < 2^63."""
    numbers = words(count)
    # The last words are too few for a whole range; if one occurs, draw all again.
    if int(numbers.max(initial=0)) >= 2**64 - 2**64 % bound:
        return integers(bound, count)
    return (numbers % np.uint64(bound)).astype(np.int64)


def subset(population: int, size: int) -> npt.NDArray[np.int64]:
    """Return a uniform subset of ``range(population)`` with ``size`` members.

    All orders of it are equally likely, so that a member's place says nothing about
    which others there are.
    """
    if 2 * size > population:
        out = subset(population, population - size)
        return np.delete(np.arange(population), out)[np.argsort(words(size))]
    chosen = np.empty(0, np.int64)
    while len(chosen) < size:
        drawn = np.append(chosen, integers(population, 2 * size))
        # Without replacement: what was drawn before does not count again.
        _, first = np.unique(drawn, return_index=True)
        chosen = drawn[np.sort(first)[:size]]
    return chosen


def uniform(count: int) -> npt.NDArray[np.float64]:
    """Return ``count`` multiples of 2^-53 in [0, 1)."""
    return (words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normal(count: int, std: float) -> npt.NDArray[np.float64]:
    """Return ``count`` draws of N(0, ``std``^2), by Marsaglia's polar method.

    A uniform point (x, y) of the unit disc with s = x^2 + y^2 gives two standard ones,
    x sqrt(-2 log(s) / s) and y sqrt(-2 log(s) / s). Coordinates have 64 bits, so that
    values far out are as finely spaced as others.
    """
    pairs = -(-count // 2)
    tries = math.ceil(pairs / _INSIDE) + 64
    x, y = words(2 * tries).view(np.int64).reshape(2, tries).astype(np.float64)
    s = x * x
    s += y * y
    inside = np.flatnonzero(s < 2.0**126)[:pairs]
    if len(inside) < pairs:  # rarely; then draw all again
        return normal(count, std)
    s = s.take(inside)
    s *= 2.0**-126
    factors = np.log(s)
    factors /= s
    factors *= -2.0 * (2.0**-63 * std) ** 2
    np.sqrt(factors, out=factors)
    values = np.empty((2, pairs))
    np.multiply(x.take(inside), factors, out=values[0])
    np.multiply(y.take(inside), factors, out=values[1])
    return values.reshape(-1)[:count]
