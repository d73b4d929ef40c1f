"""Arrays in and out of the bytes that Flower sends, without pickles and quickly.

The bytes are numpy's own .npy format. Its headers are few in a run and slow to parse, a
tenth of a small client's step, so parsed and written headers are remembered.
"""

from __future__ import annotations

import io
from functools import lru_cache

import numpy as np
from flwr.app import Array
from numpy.typing import NDArray

from flwr_safedshb.flower.compat import SType, plain_array

# The start of version 1.0, which is what numpy writes for plain arrays; two bytes
# follow with the length of the header.
_MAGIC = b"\x93NUMPY\x01\x00"
_PREFIX = len(_MAGIC) + 2
_MAX_HEADER = 1024

# The most bytes there can be before the values.
MAX_OVERHEAD = _PREFIX + _MAX_HEADER

Header = tuple[tuple[int, ...], bool, np.dtype[np.generic]]


def split(array: Array) -> tuple[Header, int]:
    """Return shape, order and dtype, and where the values begin; values are not read.

    Raises
    ------
    ValueError
        If the bytes are something else.
    """
    data = array.data
    if array.stype != SType.NUMPY or not data.startswith(_MAGIC):
        raise ValueError(f"no .npy data of version 1.0, stype={array.stype!r}")
    start = _PREFIX + int.from_bytes(data[len(_MAGIC) : _PREFIX], "little")
    if start > min(len(data), MAX_OVERHEAD):
        raise ValueError(f"a header of {start} bytes in {len(data)} bytes of data")
    return _parsed(data[len(_MAGIC) : start]), start


def decode(array: Array) -> NDArray[np.generic]:
    """Return the values, as a view that cannot be written to.

    Raises
    ------
    ValueError
        If the bytes are not those of a plain array.
    """
    return read(array, *split(array))


def read(array: Array, header: Header, start: int) -> NDArray[np.generic]:
    """Return what `decode` returns, of an array that was split already."""
    shape, fortran_order, dtype = header
    if dtype.hasobject:
        raise ValueError("an array of objects")
    values = np.frombuffer(array.data, dtype, offset=start)
    return values.reshape(shape, order="F" if fortran_order else "C")


def encode(values: NDArray[np.generic]) -> Array:
    """Return the same as ``Array(values)``."""
    values = np.ascontiguousarray(values).reshape(values.shape)
    header, dtype = _written(values.shape, values.dtype.str)
    return plain_array(dtype, values.shape, header + values.tobytes())


@lru_cache(maxsize=256)
def _parsed(header: bytes) -> Header:
    return np.lib.format.read_array_header_1_0(io.BytesIO(header))


@lru_cache(maxsize=256)
def _written(shape: tuple[int, ...], dtype: str) -> tuple[bytes, str]:
    with io.BytesIO() as buffer:
        head = {"descr": dtype, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(buffer, head)
        return buffer.getvalue(), str(np.dtype(dtype))
