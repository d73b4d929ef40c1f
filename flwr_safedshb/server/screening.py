"""What a reply is worth before it is aggregated: its layers, or why it is excluded.

Each reply is looked at alone, and nothing in it is taken at its word: the decoded
values are checked, not the shape and dtype that are declared beside them; sizes are
compared with the model's before anything is decoded; nothing is ever unpickled. Weights
and metrics that a client reports are not read at all. No reply makes this raise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from numpy.typing import NDArray

from flwr_safedshb.flower import codec

Reason = Literal[
    "missing",
    "error",
    "malformed",
    "no-arrays",
    "extra-record",
    "wrong-keys",
    "too-large",
    "wrong-dtype",
    "wrong-shape",
    "not-finite",
]

# Honest clients can be slow or fail; everything else they never send.
INNOCENT: frozenset[Reason] = frozenset({"missing", "error"})

DTYPE = np.dtype("<f4")
# What a Flower client sends beside its arrays: a Message-API client its number of
# examples, a NumPyClient that, its metrics and its status.
_MAX_METRIC_RECORDS = 1
_MAX_CONFIG_RECORDS = 2


@dataclass(frozen=True)
class Excluded:
    """A reply that is not aggregated."""

    reason: Reason

    @property
    def is_proof(self) -> bool:
        """Whether only an adversary sends such a reply."""
        return self.reason not in INNOCENT


@dataclass(frozen=True)
class Accepted:
    """A reply that is aggregated.

    Attributes
    ----------
    layers : list of float32 arrays
        Finite, in the shapes and the order of the model's.
    encoded : tuple of bytes
        The same as they were sent: an order of replies that depends on nothing else.
    """

    layers: list[NDArray[np.float32]]
    encoded: tuple[bytes, ...]


@dataclass(frozen=True)
class Template:
    """Names and shapes of a model's arrays, as every reply must have them."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, arrays: ArrayRecord) -> Template:
        """Return the template of a model that the server holds itself."""
        shapes = tuple(array.numpy().shape for array in arrays.values())
        return cls(tuple(arrays), shapes)

    def screen(self, reply: Message) -> Accepted | Excluded:
        """Return the layers of a reply, or the reason why it is excluded."""
        try:
            return self._screen(reply)
        except Exception:  # whatever a reply may hold, it is the client's fault alone
            return Excluded("malformed")

    def _screen(self, reply: Message) -> Accepted | Excluded:
        if reply.has_error():
            return Excluded("error")
        records = list(reply.content.values())
        arrays = [record for record in records if isinstance(record, ArrayRecord)]
        if not arrays:
            return Excluded("no-arrays")
        if (
            len(arrays) > 1
            or _count(records, MetricRecord) > _MAX_METRIC_RECORDS
            or _count(records, ConfigRecord) > _MAX_CONFIG_RECORDS
        ):
            return Excluded("extra-record")
        ordered = self._ordered(arrays[0])
        if ordered is None:
            return Excluded("wrong-keys")
        sizes = [math.prod(shape) * DTYPE.itemsize for shape in self.shapes]
        for array, size in zip(ordered, sizes, strict=True):
            if len(array.data) > codec.MAX_OVERHEAD + size:
                return Excluded("too-large")
        layers = []
        for array, shape in zip(ordered, self.shapes, strict=True):
            layer = _decoded(array, shape)
            if isinstance(layer, Excluded):
                return layer
            layers.append(layer)
        return Accepted(layers, tuple(array.data for array in ordered))

    def _ordered(self, record: ArrayRecord) -> list[Array] | None:
        """Return the arrays in the model's order; a NumPyClient numbers them."""
        for names in (self.names, tuple(map(str, range(len(self.names))))):
            if record.keys() == set(names):
                return [record[name] for name in names]
        return None


def _decoded(array: Array, shape: tuple[int, ...]) -> NDArray[np.float32] | Excluded:
    header, start = codec.split(array)
    found, _, dtype = header
    if dtype != DTYPE:
        return Excluded("wrong-dtype")
    if found != shape:
        return Excluded("wrong-shape")
    layer = codec.read(array, header, start).view(np.float32)
    return layer if np.isfinite(layer).all() else Excluded("not-finite")


def _count(records: Sequence[object], kind: type) -> int:
    return sum(isinstance(record, kind) for record in records)
