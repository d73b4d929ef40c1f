"""Flower's Fleet API as it goes over the wire, on both sides of the gate.

The calls and headers are those of Flower, and a message is packed as Flower's SuperNode
does inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flwr.app import Error, Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import (
    HEARTBEAT_DEFAULT_INTERVAL,
    SUPERLINK_NODE_ID,
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
)
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto import fab_pb2, fleet_pb2, heartbeat_pb2, message_pb2, run_pb2
from flwr.proto.node_pb2 import Node as NodeProto
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    FLWR_COMPONENT_NAME_METADATA_KEY,
    FLWR_PACKAGE_NAME_METADATA_KEY,
    FLWR_PACKAGE_VERSION_METADATA_KEY,
    VERSION_INCOMPATIBILITY_MESSAGE_METADATA_KEY,
)
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
)
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Proto

from flwr_safedshb.flower.compat import ErrorCode, set_process_run

__all__ = [
    "CALLS",
    "NodeProto",
    "PackedMessage",
    "fab_pb2",
    "fleet_pb2",
    "heartbeat_pb2",
    "message_from_proto",
    "message_pb2",
    "run_pb2",
]

SUPERLINK = SUPERLINK_NODE_ID
# How often a SuperNode says that it is there.
HEARTBEAT_SECONDS = float(HEARTBEAT_DEFAULT_INTERVAL)
PUBLIC_KEY, SIGNATURE = FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
TIMESTAMP = TIMESTAMP_HEADER
# Headers that a SuperNode sends and a SuperLink reads.
REQUEST_HEADERS = frozenset(
    {
        *("accept", "content-type", PUBLIC_KEY, TIMESTAMP, SIGNATURE),
        FLWR_COMPONENT_NAME_METADATA_KEY,
        FLWR_PACKAGE_NAME_METADATA_KEY,
        FLWR_PACKAGE_VERSION_METADATA_KEY,
    }
)
# Headers that a SuperLink sends and a SuperNode reads.
RESPONSE_HEADERS = frozenset(
    {"content-type", VERSION_INCOMPATIBILITY_MESSAGE_METADATA_KEY}
)
# Seconds by which a signed time may lie before and after now.
MAX_AGE = float(TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE)
MAX_LEAD = float(SYSTEM_TIME_TOLERANCE)

# What a registered node calls; all else of the Fleet API is for operators.
CALLS: Mapping[str, type[Proto]] = {
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


def parse_request(call: str, body: bytes) -> Proto:
    """Parse the request of a call, without the fields that this Flower lacks.

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


def claimed_node_id(request: Proto) -> int | None:
    """Return the id of the node that a request says it is from; None to get one."""
    if isinstance(request, fleet_pb2.ActivateNodeRequest):
        return None
    if isinstance(request, fleet_pb2.DeactivateNodeRequest):
        return request.node_id
    node_id: int = request.node.node_id
    return node_id


@dataclass(frozen=True)
class PackedMessage:
    """A message as it travels: its head, the tree of its objects, and their bytes."""

    message: message_pb2.Message
    tree: message_pb2.ObjectTree
    objects: dict[str, bytes]


def pack_message(message: Message, **changes: object) -> PackedMessage:
    """Pack a message, with other entries of its metadata if wanted."""
    for name, value in changes.items():
        message.metadata.__dict__[f"_{name}"] = value
    message.metadata.__dict__["_message_id"] = message.object_id
    parts = get_all_nested_objects(message)
    objects = {name: part.deflate() for name, part in parts.items()}
    tree = get_object_tree(message)
    bare = remove_content_from_message(message) if message.has_content() else message
    return PackedMessage(message_to_proto(bare), tree, objects)


def pack_error_reply(question: message_pb2.Metadata, reason: str) -> PackedMessage:
    """Pack an error in reply to a message, in the name of the node it was for."""
    proto = message_pb2.Message(metadata=question)
    proto.content.SetInParent()  # Flower knows no message with nothing in it
    set_process_run(question.run_id)
    error = Error(ErrorCode.CLIENT_APP_CRASHED, reason)
    return pack_message(Message(error, reply_to=message_from_proto(proto)))
