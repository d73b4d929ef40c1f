"""Send the small objects of a message inline, in the message's own protobuf.

Flower first sends the protobuf ``Message``, called the head here, and then every object
of the message by a call of its own. Each call costs some milliseconds on both sides,
and the message of a small model has a dozen objects. The head has a field for content,
which Flower's programs pass on and never read. So the sender puts its small objects
there, byte for byte, and the receiver (`InlineObjectsClient`) looks there first. Large
objects are sent as before.

The SuperLink gets a smaller object tree: the root, by which it finds the message, and
the objects that are not inline. If all objects are inline, the receiver need not
confirm the message: a confirmation makes the SuperLink delete objects, and it has none.

The receiver computes each object's id from its bytes, so inline objects are as
authentic as pulled ones. The server sends inline objects only to nodes that have sent
some, so a node that does not know them gets messages in Flower's own form.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flwr.app import Message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    PullObjectRequest,
    PullObjectResponse,
)
from flwr.proto.recorddict_pb2 import (
    BytesList,
    ConfigRecord,
    ConfigRecordValue,
    RecordDict,
)
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from flwr_safedshb.flower.object_tree import (
    hash_object,
    message_pb2,
    parse_head,
    walk_tree,
)

# The record that holds inline objects, and its one entry.
RECORD_KEY, _ENTRY_KEY = "safedshb.envelope", "objects"
# Bytes of the largest inline object, and of all of them in one head.
MAX_OBJECT_BYTES, MAX_INLINE_BYTES = 64 * 2**10, 256 * 2**10
# Objects in the tree of a message, and their depth.
MAX_OBJECTS, _MAX_DEPTH = 2**14, 16
# Bytes of protobuf framing in the head for each inline object.
_OVERHEAD_BYTES = 16
# Seconds between two calls for an object that is not available yet, and in total.
_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.05, 1.0
# Messages whose inline objects are kept at a time.
_MAX_KEPT = 64

Objects = dict[str, bytes]


def select_inline(root: str, objects: Mapping[str, bytes]) -> Objects | None:
    """Select the objects of a message to send inline; None if its tree is too large.

    All objects with children are inline: `prune_tree` keeps no tree of the others.

    Parameters
    ----------
    root : str
        The id of the message.
    objects : mapping of str to bytes
        The objects of the message, all of those with children among them.
    """
    inline = {name: each for name, each in objects.items() if parse_head(each).children}
    size = sum(map(len, inline.values()))
    if root not in inline or size > MAX_INLINE_BYTES:
        return None
    for name, each in objects.items():
        fits = len(each) <= MAX_OBJECT_BYTES and size + len(each) <= MAX_INLINE_BYTES
        if name not in inline and fits:
            inline[name] = each
            size += len(each)
    return inline


def attach_inline(head: message_pb2.Message, objects: Mapping[str, bytes]) -> None:
    """Put objects into a head; an empty mapping announces support for them."""
    value = ConfigRecordValue(bytes_list=BytesList(vals=objects.values()))
    record = ConfigRecord(items=[ConfigRecord.Item(key=_ENTRY_KEY, value=value)])
    item = RecordDict.Item(key=RECORD_KEY, config_record=record)
    head.content.CopyFrom(RecordDict(items=[item]))


def read_inline(
    head: message_pb2.Message, max_objects: int = MAX_OBJECTS
) -> Objects | None:
    """Return the inline objects in a head by id; None if `attach_inline` was not used.

    Raises
    ------
    ValueError
        If there are more than `max_objects`, since hashing each takes time, or more
        bytes than `attach_inline` is ever given.
    """
    if len(head.content.items) != 1 or head.content.items[0].key != RECORD_KEY:
        return None
    if head.content.ByteSize() > MAX_INLINE_BYTES + _OVERHEAD_BYTES * max_objects:
        raise ValueError("the inline objects are too large")
    entries = head.content.items[0].config_record.items
    found = [each for entry in entries for each in entry.value.bytes_list.vals]
    if len(found) > max_objects:
        raise ValueError("too many inline objects")
    return {hash_object(each): each for each in found}


def remove_inline(head: message_pb2.Message) -> None:
    """Remove the inline objects from a head, if there are any."""
    if head.content.items:  # an error's head must keep having no content at all
        head.ClearField("content")
        head.content.SetInParent()


def prune_tree(
    tree: message_pb2.ObjectTree, inline: Mapping[str, bytes]
) -> message_pb2.ObjectTree:
    """Return the tree that a SuperLink stores: the root and the pulled objects."""
    outside = {part.object_id for part, _ in walk_tree(tree)} - {*inline}
    leaves = [message_pb2.ObjectTree(object_id=name) for name in sorted(outside)]
    return message_pb2.ObjectTree(object_id=tree.object_id, children=leaves)


def rebuild_tree(root: str, inline: Mapping[str, bytes]) -> message_pb2.ObjectTree:
    """Rebuild the tree of a message; objects that are not inline have no children.

    Raises
    ------
    ValueError
        If the bytes are not objects, or if the tree is too large; an object that is
        named twice counts twice.
    """
    left = MAX_OBJECTS

    def build(name: str, depth: int) -> message_pb2.ObjectTree:
        nonlocal left
        left -= 1
        if left < 0 or depth > _MAX_DEPTH:
            raise ValueError("the tree of the inline objects is too large")
        children = parse_head(inline[name]).children if name in inline else []
        below = [build(child, depth + 1) for child in children]
        return message_pb2.ObjectTree(object_id=name, children=below)

    return build(root, 1)


def deflate_small_objects(message: Message, known: Objects) -> Objects:
    """Return the bytes of a message's objects by id, without large chunks of arrays.

    `known` is a cache of objects, to which new ones are added: the messages of a round
    share nearly all of their objects.
    """
    found = {}
    for name, part in get_all_nested_objects(message).items():
        if name not in known:
            if isinstance(part, ArrayChunk) and len(part.data) > MAX_OBJECT_BYTES:
                continue
            known[name] = part.deflate()
        found[name] = known[name]
    return found


class _PulledMessage(NamedTuple):
    """The inline objects of a message, and whether it also has objects to pull."""

    inline: Objects
    has_pulled_objects: bool


class InlineObjectsClient:
    """Replace the pulling calls of a Flower client by calls that read inline objects.

    These calls have the same names in the Runtime and the Fleet API. An object that is
    not available yet is asked for again after 50 ms, where Flower waits for a second.

    Parameters
    ----------
    client : RuntimeHttpClient or FleetHttpClient
        Its calls are replaced.
    on_inline : callable (Message) -> None
        Called with the head of each message that came with inline objects.
    """

    def __init__(
        self, client: Any, on_inline: Callable[[message_pb2.Message], None]
    ) -> None:
        self._pull_messages = client.PullMessages
        self._pull_object = client.PullObject
        self._confirm = client.ConfirmMessageReceived
        self._on_inline = on_inline
        self._kept: OrderedDict[str, _PulledMessage] = OrderedDict()
        vars(client).update(
            PullMessages=self.pull_messages,
            PullObject=self.pull_object,
            ConfirmMessageReceived=self.confirm,
        )

    def pull_messages(self, request: Any) -> Any:
        """Pull messages, and cache their inline objects."""
        answer = self._pull_messages(request)
        trees = answer.message_object_trees
        for head, tree in zip(answer.messages_list, trees, strict=True):
            inline = read_inline(head)
            if inline is None:
                continue
            self._on_inline(head)
            if inline:
                self._kept[tree.object_id] = _PulledMessage(inline, bool(tree.children))
                tree.CopyFrom(rebuild_tree(tree.object_id, inline))
                while len(self._kept) > _MAX_KEPT:
                    self._kept.popitem(last=False)
        return answer

    def pull_object(self, request: PullObjectRequest) -> PullObjectResponse:
        """Return an inline object, or pull the object as soon as it is available."""
        for kept in [*self._kept.values()]:
            if request.object_id in kept.inline:
                return PullObjectResponse(
                    object_found=True,
                    object_available=True,
                    object_content=kept.inline[request.object_id],
                )
        deadline = time.monotonic() + _MAX_RETRY_SECONDS
        while True:
            answer: PullObjectResponse = self._pull_object(request)
            is_coming = answer.object_found and not answer.object_available
            if not is_coming or time.monotonic() > deadline:
                return answer
            time.sleep(_RETRY_SECONDS)

    def confirm(
        self, request: ConfirmMessageReceivedRequest
    ) -> ConfirmMessageReceivedResponse:
        """Confirm a message, unless the SuperLink stores no object of it."""
        kept = self._kept.pop(request.message_object_id, None)
        if kept is not None and not kept.has_pulled_objects:
            return ConfirmMessageReceivedResponse()
        answer: ConfirmMessageReceivedResponse = self._confirm(request)
        return answer
