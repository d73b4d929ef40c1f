"""Copies of Flower's records, and vectors in and out of them.

Two things here are not public in flwr 1.41: the identity that every new Message takes
from the process, and attributes set past a class's own checks. Both stay in this file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    Metadata,
    MetricRecord,
    RecordDict,
)
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.supercore.task_identity import TaskIdentity
from numpy.typing import NDArray

from flwr_safedshb.flower import codec

T = TypeVar("T", Array, Metadata)
R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord, RecordDict)


def identify(run_id: int) -> None:
    """Say which run the messages belong to that this process makes from now on."""
    TaskIdentity.run_id = run_id
    TaskIdentity.node_id = SUPERLINK_NODE_ID
    TaskIdentity.task_id = 1
    if (TaskIdentity.run_id, TaskIdentity.task_id) != (run_id, 1):
        raise RuntimeError(
            "this version of flwr names the task of a process in another way; install "
            "flwr 1.41"
        )


def copied(content: RecordDict) -> RecordDict:
    """Return a copy that shares nothing mutable; the bytes of arrays are immutable."""
    copy = content.copy()
    copy.__dict__["_data"] = {
        key: _copied_record(record) for key, record in content.items()
    }
    return copy


def delivered(message: Message) -> Message:
    """Return the message as the other side would receive it."""
    content = copied(message.content) if message.has_content() else None
    copy = Message.__new__(Message)
    copy.__dict__.update(message.__dict__)
    copy.__dict__.update(_metadata=_same(message.metadata), _content=content)
    return copy


def refilled(record: R, entries: Mapping[str, object]) -> R:
    """Return a record of the same kind with these entries, which are not checked."""
    copy = record.copy()
    copy.__dict__["_data"] = dict(entries)
    return copy


def flattened(content: RecordDict) -> NDArray[np.float64]:
    """Return all arrays of the first ArrayRecord as one vector, (d,)."""
    record = next(iter(content.array_records.values()))
    layers = [codec.decode(array).reshape(-1) for array in record.values()]
    return np.concatenate(layers, dtype=np.float64)


def replaced(content: RecordDict, vector: NDArray[np.floating]) -> RecordDict:
    """Return a copy whose first ArrayRecord holds the values of `vector`, (d,)."""
    key = next(iter(content.array_records))
    arrays = {}
    start = 0
    for name, array in content.array_records[key].items():
        (shape, _, dtype), _ = codec.split(array)
        size = math.prod(shape)
        with np.errstate(over="ignore", invalid="ignore"):
            values = vector[start : start + size].astype(dtype).reshape(shape)
        # What a NumPyClient sends declares neither shape nor dtype.
        arrays[name] = _same(array)
        arrays[name].data = codec.encode(values).data
        start += size
    copy = copied(content)
    copy.__dict__["_data"][key] = refilled(content.array_records[key], arrays)
    return copy


def _copied_record(
    record: ArrayRecord | MetricRecord | ConfigRecord,
) -> ArrayRecord | MetricRecord | ConfigRecord:
    copy = record.copy()
    if isinstance(copy, ArrayRecord):
        for name, array in copy.items():
            copy.__dict__["_data"][name] = _same(array)
    else:
        for name, value in copy.items():
            if isinstance(value, list):
                copy.__dict__["_data"][name] = list(value)
    return copy


def _same(thing: T) -> T:
    copy = type(thing).__new__(type(thing))
    copy.__dict__.update(thing.__dict__)
    return copy
