"""How large a message is once it has been put together from its objects.

Equal parts travel once: an array names its chunks, and a record its arrays, as often
as they occur. So a few kilobytes can stand for gigabytes, and a message is measured by
what it becomes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from flwr_safedshb.flower.object_tree import parse_head

# Chunks have 5 MiB, so an array of terabytes describes itself in less; so does a record
# of thousands of arrays.
_MAX_DESCRIPTION = 2**20


class ObjectPart(NamedTuple):
    """An object of a message.

    Attributes
    ----------
    children : list of str
    size : int
        Bytes.
    is_chunk : bool
        Whether it holds bytes of an array, and nothing else.
    counts : Counter of str
        How often each child occurs in it.
    """

    children: list[str]
    size: int
    is_chunk: bool
    counts: Counter[str]


class MessageSize(NamedTuple):
    """A message: bytes of its arrays, bytes of all else, and its objects."""

    array_bytes: int
    other_bytes: int
    objects: int


def measure_object(content: bytes) -> ObjectPart:
    """Measure an object.

    Raises
    ------
    ValueError
        If messages are not made of such an object.
    """
    head = parse_head(content)
    counts = Counter(head.children)
    if head.kind in ("Array", "ArrayRecord", "RecordDict"):
        if len(content) - head.body > _MAX_DESCRIPTION:
            raise ValueError("an object whose description is too long")
        try:
            description = json.loads(content[head.body :])
            if head.kind == "Array":
                places = description["arraychunk_ids"]
                counts = Counter([head.children[place] for place in places])
            else:
                counts = Counter([*description.values()])
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError("an object that does not name its parts") from error
        except RecursionError as error:
            raise ValueError("an object that is nested too deeply") from error
        if not {*counts} <= {*head.children}:
            raise ValueError("an object with other parts than it names")
    return ObjectPart(head.children, len(content), head.kind == "ArrayChunk", counts)


def measure_servers_object(content: bytes) -> ObjectPart:
    """Measure an object of the server, which may be larger than a node's."""
    try:
        return measure_object(content)
    except ValueError:
        return ObjectPart([], len(content), False, Counter())


def measure_message(parts: Mapping[str, ObjectPart]) -> MessageSize:
    """Measure the message that objects make up."""
    known: dict[str, MessageSize] = {}

    def measure(name: str) -> MessageSize:
        if name not in known:
            part = parts[name]
            own = (part.size, 0, 1) if part.is_chunk else (0, part.size, 1)
            below = [
                [count * each for each in measure(child)]
                for child, count in part.counts.items()
                if child in parts
            ]
            known[name] = MessageSize(*map(sum, zip(own, *below, strict=True)))
        return known[name]

    inner = {child for part in parts.values() for child in part.counts}
    roots = [measure(name) for name in parts if name not in inner]
    return MessageSize(*map(sum, zip((0, 0, 0), *roots, strict=True)))
