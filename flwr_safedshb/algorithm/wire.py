"""The wire format: keys of config entries and metrics, and arrays as bytes.

The server sends the arrays of a model, by name, and every client answers with arrays of
the same names and shapes; a `Template` holds these.

The bytes are numpy's own .npy format, read without pickles. Parsing its header takes a
tenth of a small client's step, and a run has few different headers, so they are cached.
"""

from __future__ import annotations

import io
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from numpy.typing import NDArray

from flwr_safedshb.flower.compat import (
    NUMPY,
    make_array_unchecked,
    replace_entries_unchecked,
)

# Key in a reply's metrics: the arrays are a momentum. It guards against mistakes, not
# against adversaries.
MOMENTUM_TAG = "safe-dshb"

# Keys in the config of a training message: whether the server may resume from this
# step; K, the number of local steps; gamma, the learning rate between them.
CHECKPOINTED, LOCAL_STEPS, LEARNING_RATE = "anchor", "local-steps", "learning-rate"
# More would keep a node busy for hours with one message.
MAX_LOCAL_STEPS = 1000
# The most steps and private evaluations that the run takes, if the server knows them.
RUN_STEPS, RUN_EVALUATIONS = "run-steps", "run-evaluations"
# Asks a node to report the privacy cost of the run; and the keys of its report.
REPORT_PRIVACY, EPSILON, DELTA = "state-privacy", "epsilon", "delta"
# In the same report of a simulated node, whose noise protects nobody: how many examples
# were looked at, and how many of them cannot be used.
SEEN, UNUSABLE = "examples-seen", "unusable-examples"
# Asks a node for a receipt; and the keys of a receipt in the metrics of its reply.
SIGN_RECEIPT = "sign-receipt"
RECEIPT_KEYS = ("receipt", "receipt-signature", "receipt-key")

# Keys in the config of an evaluation message: the round, whose presence asks for a
# private evaluation; the loss at which losses are clipped; whether to count by class.
PRIVATE_EVALUATION, MAX_LOSS, PER_CLASS = "private-evaluation", "max-loss", "per-class"
MAX_LOSS_RANGE = 1e-6, 1e6

# Keys in the metrics of a private evaluation: the number of examples, the noisy number
# of right answers, the noisy sum of losses in units of max-loss, the standard deviation
# of the noise in these sums; and lists of such sums, one entry for each class.
NUM_EXAMPLES = "num-examples"
CORRECT, LOSS, NOISE_STD = "correct", "loss", "noise-std"
SUMS = (CORRECT, LOSS)
CLASS_COUNT, CLASS_CORRECT, CLASS_LOSS = "class-count", "class-correct", "class-loss"
CLASS_SUMS = (CLASS_COUNT, CLASS_CORRECT, CLASS_LOSS)

Arrays = list[NDArray[np.generic]]
Mismatch = Literal["wrong-keys", "too-large", "wrong-dtype", "wrong-shape"]

# The magic string of .npy version 1.0, which numpy writes for plain arrays; two bytes
# with the length of the header follow.
_MAGIC = b"\x93NUMPY\x01\x00"
_PREFIX = len(_MAGIC) + 2
_MAX_HEADER = 1024
# The most bytes before the values.
_MAX_OVERHEAD = _PREFIX + _MAX_HEADER

# How many names an error quotes, and how many characters of each.
_MAX_NAMES, _MAX_NAME_LENGTH = 3, 60
# Records that `replace_entries_unchecked` copies.
_NO_ARRAYS, _METRICS = ArrayRecord(), MetricRecord({NUM_EXAMPLES: 0})
_CONFIG = ConfigRecord()

_Header = tuple[tuple[int, ...], bool, np.dtype[np.generic]]


class TemplateMismatchError(ValueError):
    """A record does not fit the template; `reason` says how they differ."""

    def __init__(self, reason: Mismatch) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Template:
    """The names and shapes of a model's trained arrays.

    >>> model = ArrayRecord({"weight": Array(np.zeros((2, 3), np.float32))})
    >>> Template.of(model)
    Template(names=('weight',), shapes=((2, 3),))
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, record: ArrayRecord) -> Template:
        """Return the template of a trusted model."""
        return cls(tuple(record), tuple(array.shape for array in decode_arrays(record)))

    def decode(self, record: ArrayRecord) -> tuple[tuple[str, ...], Arrays]:
        """Return names and values of a server's record, in the model's order.

        Names may also be "0", "1", ..., as NumPyClients use them.

        Raises
        ------
        ValueError
            If the names differ, or the bytes are not those of plain arrays.
        """
        try:
            arrays = self._order_arrays(record)
        except TemplateMismatchError:
            unknown = [name for name in record if name not in self.names]
            missing = [name for name in self.names if name not in record]
            lists = (("has", unknown), ("lacks", missing))
            problems = [
                f"{word} {_shorten_names(names)}" for word, names in lists if names
            ]
            raise ValueError(
                f"the message {' and '.join(problems)}, and the arrays of a message "
                "must be those that the client trains: start the run from "
                "trained_arrays(model)"
            ) from None
        try:
            values = [
                _read_values(array, *_parse_header(array)) for array in arrays.values()
            ]
        except ValueError as error:
            raise ValueError(
                f"the arrays of the message cannot be read: {error}"
            ) from None
        return tuple(arrays), values

    def decode_untrusted(
        self, record: ArrayRecord, dtype: np.dtype[np.generic]
    ) -> tuple[Arrays, tuple[bytes, ...]]:
        """Return the values and the bytes of a record that an adversary may have made.

        Sizes are checked before anything is decoded. Then the header of the bytes is
        checked, not the shape and dtype that the record declares beside them.

        Raises
        ------
        TemplateMismatchError
        ValueError
            If the bytes are not those of plain arrays.
        """
        arrays = self._order_arrays(record).values()
        for array, shape in zip(arrays, self.shapes, strict=True):
            if len(array.data) > _MAX_OVERHEAD + math.prod(shape) * dtype.itemsize:
                raise TemplateMismatchError("too-large")
        layers = []
        for array, shape in zip(arrays, self.shapes, strict=True):
            header, start = _parse_header(array)
            if header[2] != dtype:
                raise TemplateMismatchError("wrong-dtype")
            if header[0] != shape:
                raise TemplateMismatchError("wrong-shape")
            layers.append(_read_values(array, header, start))
        return layers, tuple(array.data for array in arrays)

    def _order_arrays(self, record: ArrayRecord) -> dict[str, Array]:
        """Return the arrays in the model's order, by name or by number."""
        for names in (self.names, tuple(map(str, range(len(self.names))))):
            if record.keys() == set(names):
                return {name: record[name] for name in names}
        raise TemplateMismatchError("wrong-keys")


def split_vector(
    vector: NDArray[np.float32], shapes: Sequence[tuple[int, ...]]
) -> Arrays:
    """Return the consecutive parts of a vector, (d,), as arrays of these shapes."""
    ends = np.cumsum([math.prod(shape) for shape in shapes[:-1]], dtype=int)
    parts = np.split(vector, ends)
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def make_momentum_tag() -> dict[str, int]:
    """Return the tag of a momentum, with a random number.

    A record is sent under the hash of its bytes. An adversary who could predict the
    bytes could send a record under the same hash first.
    """
    return {MOMENTUM_TAG: secrets.randbits(62)}


def decode_arrays(record: ArrayRecord) -> Arrays:
    """Return the values of a record's arrays as read-only views.

    Raises
    ------
    ValueError
        If the bytes are not those of plain arrays.
    """
    return [_read_values(array, *_parse_header(array)) for array in record.values()]


def encode_record(
    names: Iterable[str], arrays: Iterable[NDArray[np.generic]]
) -> ArrayRecord:
    """Return a record of arrays by name."""
    values = zip(names, arrays, strict=True)
    return replace_entries_unchecked(
        _NO_ARRAYS, {name: encode_array(array) for name, array in values}
    )


def reply_with(
    message: Message,
    names: Iterable[str],
    momentum: Arrays,
    num_examples: int,
    metrics: Mapping[str, object],
) -> Message:
    """Return a reply with the momentum under the names of the model's arrays.

    Only the momentum tag, the privacy report and the receipt of the client's metrics
    are sent.
    """
    sent = {k: metrics[k] for k in (EPSILON, DELTA, MOMENTUM_TAG) if k in metrics}
    receipt = {k: metrics[k] for k in RECEIPT_KEYS if k in metrics}
    records = {
        "arrays": encode_record(names, momentum),
        "metrics": replace_entries_unchecked(
            _METRICS, {NUM_EXAMPLES: num_examples, **sent}
        ),
    }
    if receipt:
        records["receipt"] = replace_entries_unchecked(_CONFIG, receipt)
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
    """Return ``Array(values)``, made with a cached header."""
    values = np.ascontiguousarray(values).reshape(values.shape)
    header, dtype = _make_npy_header(values.shape, values.dtype.str)
    return make_array_unchecked(dtype, values.shape, header + values.tobytes())


def _parse_header(array: Array) -> tuple[_Header, int]:
    """Return shape, order and dtype from the header, and where the values begin."""
    data = array.data
    if array.stype != NUMPY or not data.startswith(_MAGIC):
        raise ValueError(f"no .npy data of version 1.0, stype={array.stype!r}")
    start = _PREFIX + int.from_bytes(data[len(_MAGIC) : _PREFIX], "little")
    if start > min(len(data), _MAX_OVERHEAD):
        raise ValueError(f"a header of {start} bytes in {len(data)} bytes of data")
    return _parse_npy_header(data[len(_MAGIC) : start]), start


def _read_values(array: Array, header: _Header, start: int) -> NDArray[np.generic]:
    shape, fortran_order, dtype = header
    if dtype.hasobject:
        raise ValueError("an array of objects")
    values = np.frombuffer(array.data, dtype, offset=start)
    return values.reshape(shape, order="F" if fortran_order else "C")


def _shorten_names(names: list[str]) -> str:
    num_more = len(names) - _MAX_NAMES
    text = ", ".join(name[:_MAX_NAME_LENGTH] for name in names[:_MAX_NAMES])
    return text + (f" and {num_more} more" if num_more > 0 else "")


@lru_cache(maxsize=256)
def _parse_npy_header(header: bytes) -> _Header:
    return np.lib.format.read_array_header_1_0(io.BytesIO(header))


@lru_cache(maxsize=256)
def _make_npy_header(shape: tuple[int, ...], dtype: str) -> tuple[bytes, str]:
    with io.BytesIO() as buffer:
        head = {"descr": dtype, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(buffer, head)
        return buffer.getvalue(), str(np.dtype(dtype))
