"""How large a message is once it has been put together from its objects.

What is alike travels once: an array names the chunks that it is made of, and a record
its arrays, as often as they are in it. So a few kilobytes can stand for gigabytes, and
a message is measured by what it becomes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from flwr_safedshb.flower import fleet

# Chunks have 5 MiB, so an array of terabytes says less of itself; so does a record of
# thousands of arrays.
_MAX_WORDS = 2**20


class Part(NamedTuple):
    """An object of a message.

    Attributes
    ----------
    children : list of str
    size : int
        Of its bytes.
    is_chunk : bool
        Whether it is bytes of an array, and nothing else.
    times : Counter of str
        How often each child is in it.
    """

    children: list[str]
    size: int
    is_chunk: bool
    times: Counter[str]


class Sizes(NamedTuple):
    """A message: bytes of its arrays, bytes of all else, and its objects."""

    arrays: int
    words: int
    objects: int


def measured(content: bytes) -> Part:
    """Return what an object is.

    Raises
    ------
    ValueError
        If it is none that a message is made of.
    """
    head = fleet.head(content)
    times = Counter(head.children)
    if head.kind in ("Array", "ArrayRecord", "RecordDict"):
        if len(content) - head.body > _MAX_WORDS:
            raise ValueError("an object that says too much of itself")
        try:
            said = json.loads(content[head.body :])
            if head.kind == "Array":
                names = [head.children[place] for place in said["arraychunk_ids"]]
            else:
                names = [*said.values()]
            times = Counter(names)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError("an object that does not say its parts") from error
        except RecursionError as error:
            raise ValueError("an object that is nested too deeply") from error
        if not {*times} <= {*head.children}:
            raise ValueError("an object with other parts than it names")
    return Part(head.children, len(content), head.kind == "ArrayChunk", times)


def put_together(parts: Mapping[str, Part]) -> Sizes:
    """Return how large the message becomes that objects are of."""
    known: dict[str, Sizes] = {}

    def size(name: str) -> Sizes:
        if name not in known:
            part = parts[name]
            own = (part.size, 0, 1) if part.is_chunk else (0, part.size, 1)
            inside = [
                [times * each for each in size(child)]
                for child, times in part.times.items()
                if child in parts
            ]
            known[name] = Sizes(*map(sum, zip(own, *inside, strict=True)))
        return known[name]

    below = {child for part in parts.values() for child in part.times}
    tops = [size(name) for name in parts if name not in below]
    return Sizes(*map(sum, zip((0, 0, 0), *tops, strict=True)))
