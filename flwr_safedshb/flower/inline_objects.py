"""Envelopes: the small objects of a message travel together, in its head.

Flower sends the head of a message, and then every object of its tree by a call of its
own. A call costs some milliseconds on both sides whatever it brings, and the message of
a small model has a dozen of objects. The head of a message has room for content, which
Flower's programs keep and hand on as it is, and do not read. So whoever makes a message
puts its small objects there, as they are, byte for byte; whoever gets one looks there
first (`opener`). Large objects travel on their own, as they always do.

A SuperLink is told less of the tree: its root, by which it finds the message, and what
is not inside. The root is never sent there by itself: nobody asks for it. Where all of
a message is inside, nobody has to confirm either that it has come: that makes the
SuperLink delete objects, and it has none.

Who opens an envelope computes the id of each object from its bytes, so that an envelope
can no more lie about an object than a call can. Who does not know of envelopes never
gets less than Flower's own form: the server sends them to nodes that have sent one.
"""

from __future__ import annotations

from collections.abc import Mapping

from flwr.proto.recorddict_pb2 import (
    BytesList,
    ConfigRecord,
    ConfigRecordValue,
    RecordDict,
)

from flwr_safedshb.flower import fleet
from flwr_safedshb.flower.fleet import message_pb2

# The record that is an envelope, and its one entry.
NAME, _OBJECTS = "safedshb.envelope", "objects"
# Bytes of the largest object in an envelope, and of all of them.
SMALL, MOST = 64 * 2**10, 256 * 2**10
# Objects in the tree of a message, and how deep they lie.
MAX_OBJECTS, _MAX_DEPTH = 2**14, 16
# Bytes that a head needs for each object in it, beside the object.
_HEADS = 16

Objects = dict[str, bytes]


def chosen(root: str, objects: Mapping[str, bytes]) -> Objects | None:
    """Return the objects that an envelope is for, None if there is none for this.

    Parameters
    ----------
    root : str
        The id of the message.
    objects : mapping of str to bytes
        The objects of the message, with all that have children.
    """
    inner = {name: each for name, each in objects.items() if fleet.head(each).children}
    size = sum(map(len, inner.values()))
    if root not in inner or size > MOST:
        return None
    for name, each in objects.items():
        if name not in inner and len(each) <= SMALL and size + len(each) <= MOST:
            inner[name] = each
            size += len(each)
    return inner


def seal(message: message_pb2.Message, inside: Mapping[str, bytes]) -> None:
    """Put objects into the head of a message; none, to say that one is understood."""
    value = ConfigRecordValue(bytes_list=BytesList(vals=inside.values()))
    record = ConfigRecord(items=[ConfigRecord.Item(key=_OBJECTS, value=value)])
    item = RecordDict.Item(key=NAME, config_record=record)
    message.content.CopyFrom(RecordDict(items=[item]))


def opened(message: message_pb2.Message, most: int = MAX_OBJECTS) -> Objects | None:
    """Return the objects in the head of a message, None if it has no envelope.

    Parameters
    ----------
    message : Message
        The head.
    most : int
        Objects that there may be: to compute the id of each takes time.

    Raises
    ------
    ValueError
        If there are more, or more bytes than in any envelope.
    """
    if len(message.content.items) != 1 or message.content.items[0].key != NAME:
        return None
    if message.content.ByteSize() > MOST + _HEADS * most:
        raise ValueError("an envelope that is too large")
    entries = message.content.items[0].config_record.items
    found = [each for entry in entries for each in entry.value.bytes_list.vals]
    if len(found) > most:
        raise ValueError("an envelope of too many objects")
    return {fleet.object_id(each): each for each in found}


def empty(message: message_pb2.Message) -> None:
    """Take the envelope out of the head of a message, if there is one."""
    if message.content.items:  # the head of an error has no content, not even none
        message.ClearField("content")
        message.content.SetInParent()


def outer_tree(
    tree: message_pb2.ObjectTree, inside: Mapping[str, bytes]
) -> message_pb2.ObjectTree:
    """Return the tree of what a SuperLink keeps: the root, and what is not inside."""
    outside = {part.object_id for part, _ in fleet.walk(tree)} - {*inside}
    leaves = [message_pb2.ObjectTree(object_id=name) for name in sorted(outside)]
    return message_pb2.ObjectTree(object_id=tree.object_id, children=leaves)


def whole_tree(name: str, inside: Mapping[str, bytes]) -> message_pb2.ObjectTree:
    """Return the tree of a message; what is not inside has no children.

    Raises
    ------
    ValueError
        If the bytes inside are not objects, or stand for a tree without end: what is
        named twice is in it twice.
    """
    left = MAX_OBJECTS

    def tree(name: str, depth: int) -> message_pb2.ObjectTree:
        nonlocal left
        left -= 1
        if left < 0 or depth > _MAX_DEPTH:
            raise ValueError("an envelope with a tree that is too large")
        children = fleet.head(inside[name]).children if name in inside else []
        below = [tree(child, depth + 1) for child in children]
        return message_pb2.ObjectTree(object_id=name, children=below)

    return tree(name, 1)
