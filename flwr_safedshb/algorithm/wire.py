"""The arrays of a message: their names and shapes, and their values as bytes.

The server sends the arrays of a model, by name, and every client answers with arrays of
the same names and shapes; a `Template` holds them.

The bytes are numpy's own .npy format, which is read without pickles. Its headers are
few in a run and slow to parse, a tenth of a small client's step, so parsed and written
headers are remembered.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from numpy.typing import NDArray

from flwr_safedshb.flower.compat import (
    NUMPY,
    make_array_unchecked,
    replace_entries_unchecked,
)

# A number under this name, its own in every reply, says that the arrays are a momentum:
# a guard against mistakes, and no proof.
MOMENTUM_TAG = "safe-dshb"
# Steps that a node takes before it answers (K), and the rate that it takes them at.
LOCAL_STEPS = "local-steps"
LEARNING_RATE = "learning-rate"
# More would keep a node busy for hours with one message.
MAX_LOCAL_STEPS = 1000

# How many steps and private evaluations the run takes at most, where that is known.
RUN_STEPS, RUN_EVALUATIONS = "run-steps", "run-evaluations"

# Asks a node to state what a run costs its examples, under the names that follow.
REPORT_PRIVACY, EPSILON, DELTA = "state-privacy", "epsilon", "delta"

Arrays = list[NDArray[np.generic]]
Misfit = Literal["wrong-keys", "too-large", "wrong-dtype", "wrong-shape"]

# The start of version 1.0, which is what numpy writes for plain arrays; two bytes
# follow with the length of the header.
_MAGIC = b"\x93NUMPY\x01\x00"
_PREFIX = len(_MAGIC) + 2
_MAX_HEADER = 1024
# The most bytes there can be before the values.
_MAX_OVERHEAD = _PREFIX + _MAX_HEADER

# Names that an error quotes, and characters of each.
_TOLD, _LONG = 3, 60
_NOTHING, _METRICS = ArrayRecord(), MetricRecord({"num-examples": 0})

_Header = tuple[tuple[int, ...], bool, np.dtype[np.generic]]


class MisfitError(ValueError):
    """A record has other arrays than it must have; `reason` says how they differ."""

    def __init__(self, reason: Misfit) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Template:
    """Names and shapes of a model's arrays, as every reply must have them.

    >>> model = ArrayRecord({"weight": Array(np.zeros((2, 3), np.float32))})
    >>> Template.of(model)
    Template(names=('weight',), shapes=((2, 3),))
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, record: ArrayRecord) -> Template:
        """Return the template of a model that this side holds itself."""
        return cls(tuple(record), tuple(array.shape for array in decode_arrays(record)))

    def decode(self, record: ArrayRecord) -> tuple[tuple[str, ...], Arrays]:
        """Return names and values of what the server sends, in the model's order.

        Raises
        ------
        ValueError
            If it has other names, and does not number its arrays either, or its bytes
            are not those of plain arrays.
        """
        try:
            arrays = self._ordered(record)
        except MisfitError:
            idle = [name for name in record if name not in self.names]
            missing = [name for name in self.names if name not in record]
            told = (("has", idle), ("lacks", missing))
            problems = [f"{word} {_few(names)}" for word, names in told if names]
            raise ValueError(
                f"the message {' and '.join(problems)}, and the arrays of a message "
                "must be those that the client trains: start the run from "
                "trained_arrays(model)"
            ) from None
        try:
            values = [_values(array, *_split(array)) for array in arrays.values()]
        except ValueError as error:
            raise ValueError(
                f"the arrays of the message cannot be read: {error}"
            ) from None
        return tuple(arrays), values

    def split(self, vector: NDArray[np.float32]) -> Arrays:
        """Return a vector, (d,), of all that a model trains as arrays."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes[:-1]], dtype=int)
        parts = np.split(vector, ends)
        return [p.reshape(s) for p, s in zip(parts, self.shapes, strict=True)]

    def decode_untrusted(
        self, record: ArrayRecord, dtype: np.dtype[np.generic]
    ) -> tuple[Arrays, tuple[bytes, ...]]:
        """Return the values of a record that others have made, and their bytes.

        The decoded values are checked, not the shape and dtype that are declared beside
        them, and all sizes before anything is decoded.

        Raises
        ------
        MisfitError
        ValueError
            If the bytes are not those of plain arrays.
        """
        arrays = self._ordered(record).values()
        for array, shape in zip(arrays, self.shapes, strict=True):
            if len(array.data) > _MAX_OVERHEAD + math.prod(shape) * dtype.itemsize:
                raise MisfitError("too-large")
        layers = []
        for array, shape in zip(arrays, self.shapes, strict=True):
            header, start = _split(array)
            if header[2] != dtype:
                raise MisfitError("wrong-dtype")
            if header[0] != shape:
                raise MisfitError("wrong-shape")
            layers.append(_values(array, header, start))
        return layers, tuple(array.data for array in arrays)

    def _ordered(self, record: ArrayRecord) -> dict[str, Array]:
        """Return the arrays in the model's order; a NumPyClient numbers them."""
        for names in (self.names, tuple(map(str, range(len(self.names))))):
            if record.keys() == set(names):
                return {name: record[name] for name in names}
        raise MisfitError("wrong-keys")


def decode_arrays(record: ArrayRecord) -> Arrays:
    """Return the values of a record's arrays, as views that cannot be written to.

    Raises
    ------
    ValueError
        If the bytes are not those of plain arrays.
    """
    return [_values(array, *_split(array)) for array in record.values()]


def encode_record(
    names: Iterable[str], arrays: Iterable[NDArray[np.generic]]
) -> ArrayRecord:
    """Return a record with these names, which may be those of another, and values."""
    values = zip(names, arrays, strict=True)
    return replace_entries_unchecked(
        _NOTHING, {name: encode_array(array) for name, array in values}
    )


def reply_with(
    message: Message,
    names: Iterable[str],
    momentum: Arrays,
    num_examples: int,
    said: Mapping[str, object],
) -> Message:
    """Return the momentum under the names of the model's arrays.

    Of what the client says beside it, only its mark and the cost of the run go along.
    """
    kept = {name: said[name] for name in (EPSILON, DELTA, MOMENTUM_TAG) if name in said}
    metrics = {"num-examples": num_examples, **kept}
    records = {
        "arrays": encode_record(names, momentum),
        "metrics": replace_entries_unchecked(_METRICS, metrics),
    }
    return Message(
        replace_entries_unchecked(message.content, records), reply_to=message
    )


def apply_update(
    record: ArrayRecord, direction: Iterable[NDArray[np.generic]], rate: float
) -> ArrayRecord | None:
    """Return theta - rate * R, in the dtypes of theta; None if it is not finite."""
    pairs = zip(decode_arrays(record), direction, strict=True)
    result = [sgd_step(weights, layer, rate) for weights, layer in pairs]
    finite = all(np.isfinite(layer).all() for layer in result)
    return encode_record(record, result) if finite else None


def sgd_step(
    weights: NDArray[np.generic], direction: NDArray[np.generic], rate: float
) -> NDArray[np.generic]:
    """Return theta - rate * R, computed in float64, in the dtype of theta."""
    with np.errstate(over="ignore", invalid="ignore"):
        exact = weights.astype(np.float64) - rate * direction.astype(np.float64)
        return exact.astype(weights.dtype)


def encode_array(values: NDArray[np.generic]) -> Array:
    """Return the same as ``Array(values)``, of arrays without an axis, too."""
    values = np.ascontiguousarray(values).reshape(values.shape)
    header, dtype = _written_header(values.shape, values.dtype.str)
    return make_array_unchecked(dtype, values.shape, header + values.tobytes())


def _split(array: Array) -> tuple[_Header, int]:
    """Return shape, order and dtype, and where the values begin, which are not read."""
    data = array.data
    if array.stype != NUMPY or not data.startswith(_MAGIC):
        raise ValueError(f"no .npy data of version 1.0, stype={array.stype!r}")
    start = _PREFIX + int.from_bytes(data[len(_MAGIC) : _PREFIX], "little")
    if start > min(len(data), _MAX_OVERHEAD):
        raise ValueError(f"a header of {start} bytes in {len(data)} bytes of data")
    return _parsed_header(data[len(_MAGIC) : start]), start


def _values(array: Array, header: _Header, start: int) -> NDArray[np.generic]:
    shape, fortran_order, dtype = header
    if dtype.hasobject:
        raise ValueError("an array of objects")
    values = np.frombuffer(array.data, dtype, offset=start)
    return values.reshape(shape, order="F" if fortran_order else "C")


def _few(names: list[str]) -> str:
    more = len(names) - _TOLD
    told = ", ".join(name[:_LONG] for name in names[:_TOLD])
    return told + (f" and {more} more" if more > 0 else "")


@lru_cache(maxsize=256)
def _parsed_header(header: bytes) -> _Header:
    return np.lib.format.read_array_header_1_0(io.BytesIO(header))


@lru_cache(maxsize=256)
def _written_header(shape: tuple[int, ...], dtype: str) -> tuple[bytes, str]:
    with io.BytesIO() as buffer:
        head = {"descr": dtype, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(buffer, head)
        return buffer.getvalue(), str(np.dtype(dtype))
