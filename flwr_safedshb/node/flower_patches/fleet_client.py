"""A node's side of the Fleet API: how it signs its calls, and what a message becomes.

Flower's SuperNode does this inside. Apart from it, it is what shows that the gate
answers a node, and that it does not believe one.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Error, Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.node_pb2 import Node as NodeProto
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
)

from flwr_safedshb.flower import fleet
from flwr_safedshb.flower.compat import ErrorCode, set_process_run
from flwr_safedshb.flower.fleet import message_pb2

__all__ = [
    "NodeProto",
    "Packed",
    "given_up",
    "load_key",
    "packed",
    "pem",
    "received",
    "signed",
]

Key = ec.EllipticCurvePrivateKey


@dataclass(frozen=True)
class Packed:
    """A message as it travels: its head, the tree of its objects, and their bytes."""

    message: message_pb2.Message
    tree: message_pb2.ObjectTree
    objects: dict[str, bytes]


def load_key(content: bytes) -> Key:
    """Return a node's private key, as ``ssh-keygen`` writes it."""
    key = serialization.load_ssh_private_key(content, None)
    if not isinstance(key, Key):
        raise ValueError("a node's key must be on an elliptic curve")
    return key


def pem(key: Key) -> bytes:
    """Return the public key, as calls carry it."""
    return key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def signed(key: Key, when: datetime | None = None) -> dict[str, str]:
    """Return the headers by which a node proves who it is."""
    time = (when or datetime.now(UTC)).isoformat()
    signature = key.sign(time.encode(), ec.ECDSA(hashes.SHA256()))
    return {
        fleet.PUBLIC_KEY: base64.b64encode(pem(key)).decode(),
        fleet.SIGNATURE: base64.b64encode(signature).decode(),
        fleet.TIMESTAMP: time,
        "content-type": "application/protobuf",
    }


def packed(message: Message, **changes: object) -> Packed:
    """Return what a message becomes, with other entries of its metadata if wanted."""
    for name, value in changes.items():
        message.metadata.__dict__[f"_{name}"] = value
    message.metadata.__dict__["_message_id"] = message.object_id
    parts = get_all_nested_objects(message)
    objects = {name: part.deflate() for name, part in parts.items()}
    tree = get_object_tree(message)
    bare = remove_content_from_message(message) if message.has_content() else message
    return Packed(message_to_proto(bare), tree, objects)


def given_up(asked: message_pb2.Metadata, reason: str) -> Packed:
    """Return an error in answer to a message, in the name of the node it was for."""
    proto = message_pb2.Message(metadata=asked)
    proto.content.SetInParent()  # Flower knows no message with nothing in it
    set_process_run(asked.run_id)
    error = Error(ErrorCode.CLIENT_APP_CRASHED, reason)
    return packed(Message(error, reply_to=received(proto)))


def received(proto: message_pb2.Message) -> Message:
    """Return a message that was pulled, without its content, to reply to."""
    return message_from_proto(proto)
