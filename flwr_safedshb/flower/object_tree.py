"""The objects that a Flower message travels as.

A message is a tree of objects. An object's id is the SHA-256 of its bytes; their head
names its kind, the ids of its children and its length. So whoever has the bytes knows
what the tree below must be.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import NamedTuple

from flwr.proto import message_pb2
from google.protobuf.message import DecodeError

__all__ = ["message_pb2"]

_OBJECT_ID = re.compile(r"[0-9a-f]{64}", re.ASCII)
_ARRAYS = ("ArrayRecord", "Array", "ArrayChunk")
_KINDS = ("Message", "RecordDict", *_ARRAYS, "ConfigRecord", "MetricRecord")
# A head names each child by 65 bytes.
_MAX_HEAD_BYTES = 2**20


class ObjectHead(NamedTuple):
    """What the first bytes of an object say; its body starts at `body`."""

    kind: str
    children: list[str]
    body: int


def hash_object(content: bytes) -> str:
    """Return the id of an object with these bytes."""
    return hashlib.sha256(content).hexdigest()


def is_object_id(text: str) -> bool:
    """Return True if a text has the form of an object's id."""
    return _OBJECT_ID.fullmatch(text) is not None


def parse_head(content: bytes) -> ObjectHead:
    """Parse the head of an object.

    Raises
    ------
    ValueError
        If the bytes are not an object of a kind that messages are made of.
    """
    end = content.find(b"\0", 0, _MAX_HEAD_BYTES)
    words = content[:end].decode("ascii", "replace").split(" ") if end > 0 else []
    if len(words) != 3 or words[0] not in _KINDS:
        raise ValueError("not an object that a message is made of")
    kind, ids, size = words
    if size != str(len(content) - end - 1):
        raise ValueError("an object with another length than it states")
    return ObjectHead(kind, ids.split(",") if ids else [], end + 1)


def parse_root(content: bytes) -> message_pb2.Message:
    """Parse the root object of a tree, which holds the message's metadata or error.

    Raises
    ------
    ValueError
        If the bytes are not such an object.
    """
    head = parse_head(content)
    if head.kind != "Message":
        raise ValueError("the root of a tree must be a message")
    message = message_pb2.Message()
    try:
        message.ParseFromString(content[head.body :])
    except (DecodeError, RecursionError) as error:
        raise ValueError("a message that cannot be parsed") from error
    return message


def walk_tree(
    tree: message_pb2.ObjectTree, depth: int = 1
) -> Iterator[tuple[message_pb2.ObjectTree, int]]:
    """Yield every node of a tree with its depth, from 1 at the root."""
    yield tree, depth
    for child in tree.children:
        yield from walk_tree(child, depth + 1)
