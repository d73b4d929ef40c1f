"""Flower's Fleet API as it goes over the wire: calls, headers, objects.

A message travels as a tree of objects. An object's id is the hash of its bytes, and the
head of these bytes names its type and the ids of its children: so whoever has the bytes
knows what the tree below must be.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from flwr.common.constant import (
    HEARTBEAT_DEFAULT_INTERVAL,
    SUPERLINK_NODE_ID,
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
)
from flwr.proto import fab_pb2, fleet_pb2, heartbeat_pb2, message_pb2, run_pb2
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    FLWR_COMPONENT_NAME_METADATA_KEY,
    FLWR_PACKAGE_NAME_METADATA_KEY,
    FLWR_PACKAGE_VERSION_METADATA_KEY,
    VERSION_INCOMPATIBILITY_MESSAGE_METADATA_KEY,
)
from google.protobuf.message import DecodeError, Message

__all__ = [
    "CALLS",
    "DecodeError",
    "Head",
    "fab_pb2",
    "fleet_pb2",
    "heartbeat_pb2",
    "message_pb2",
    "run_pb2",
    "walk",
]

SERVER = SUPERLINK_NODE_ID
# How often a SuperNode says that it is there.
HEARTBEAT_SECONDS = float(HEARTBEAT_DEFAULT_INTERVAL)
PUBLIC_KEY, TIMESTAMP, SIGNATURE = (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    TIMESTAMP_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
)
# Headers that a SuperNode sends and a SuperLink reads.
REQUEST_HEADERS = frozenset(
    {
        "accept",
        "content-type",
        PUBLIC_KEY,
        TIMESTAMP,
        SIGNATURE,
        FLWR_COMPONENT_NAME_METADATA_KEY,
        FLWR_PACKAGE_NAME_METADATA_KEY,
        FLWR_PACKAGE_VERSION_METADATA_KEY,
    }
)
# Headers that a SuperLink sends and a SuperNode reads.
ANSWER_HEADERS = frozenset(
    {"content-type", VERSION_INCOMPATIBILITY_MESSAGE_METADATA_KEY}
)
# Seconds by which a signed time may lie before and after now.
MAX_AGE = float(TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE)
MAX_LEAD = float(SYSTEM_TIME_TOLERANCE)

# What a registered node calls; all else of the Fleet API is for operators.
CALLS: Mapping[str, type[Message]] = {
    "activate-node": fleet_pb2.ActivateNodeRequest,
    "deactivate-node": fleet_pb2.DeactivateNodeRequest,
    "send-node-heartbeat": heartbeat_pb2.SendNodeHeartbeatRequest,
    "pull-messages": fleet_pb2.PullMessagesRequest,
    "push-messages": fleet_pb2.PushMessagesRequest,
    "confirm-message-received": message_pb2.ConfirmMessageReceivedRequest,
    "pull-object": message_pb2.PullObjectRequest,
    "push-object": message_pb2.PushObjectRequest,
    "get-run": run_pb2.GetRunRequest,
    "get-fab": fab_pb2.GetFabRequest,
}

_OBJECT_ID = re.compile(r"[0-9a-f]{64}", re.ASCII)
_KINDS = frozenset(
    {
        "Message",
        "RecordDict",
        "ArrayRecord",
        "Array",
        "ArrayChunk",
        "ConfigRecord",
        "MetricRecord",
    }
)
# A head names its children by 65 bytes each.
_MAX_HEAD = 2**20


class Head(NamedTuple):
    """What the first bytes of an object say of it."""

    kind: str
    children: list[str]
    body: int  # where the body starts


def object_id(content: bytes) -> str:
    """Return the id of an object with these bytes."""
    return hashlib.sha256(content).hexdigest()


def is_object_id(text: str) -> bool:
    """Say whether a text has the form of an object's id."""
    return _OBJECT_ID.fullmatch(text) is not None


def head(content: bytes) -> Head:
    """Return what an object says of itself.

    Raises
    ------
    ValueError
        If these bytes are not an object of a kind that messages are made of.
    """
    end = content.find(b"\0", 0, _MAX_HEAD)
    words = content[:end].decode("ascii", "replace").split(" ") if end > 0 else []
    if len(words) != 3 or words[0] not in _KINDS:
        raise ValueError("not an object that a message is made of")
    kind, ids, size = words
    if size != str(len(content) - end - 1):
        raise ValueError("an object whose length is not what it says")
    return Head(kind, ids.split(",") if ids else [], end + 1)


def root(content: bytes) -> message_pb2.Message:
    """Return what the object of a message says: whose it is, or why it failed."""
    found = head(content)
    if found.kind != "Message":
        raise ValueError("the root of a tree must be a message")
    message = message_pb2.Message()
    try:
        message.ParseFromString(content[found.body :])
    except (DecodeError, RecursionError) as error:
        raise ValueError("a message that cannot be read") from error
    return message


def walk(
    tree: message_pb2.ObjectTree, depth: int = 1
) -> Iterator[tuple[message_pb2.ObjectTree, int]]:
    """Yield every node of a tree with its depth, from 1 at the root."""
    yield tree, depth
    for child in tree.children:
        yield from walk(child, depth + 1)


def parsed(call: str, body: bytes) -> Message:
    """Return the request of a call, without the fields that this Flower lacks.

    Raises
    ------
    ValueError
        If the bytes are not such a request.
    """
    request = CALLS[call]()
    try:
        request.ParseFromString(body)
    except (DecodeError, RecursionError) as error:
        raise ValueError(f"not a {call} request") from error
    request.DiscardUnknownFields()
    return request


def caller(request: Message) -> int | None:
    """Return the id of the node that a request says it is from; None to get one."""
    if isinstance(request, fleet_pb2.ActivateNodeRequest):
        return None
    if isinstance(request, fleet_pb2.DeactivateNodeRequest):
        return request.node_id
    node: int = request.node.node_id
    return node
