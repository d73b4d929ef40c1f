"""Replies on their way in: complete and consistent before the SuperLink hears of them.

Flower registers the tree of a reply first and takes its objects afterwards. So a node
could register an object that another will send, with false children, and that other's
message would be refused; or announce a reply whose objects never come, and the server
would wait for it. The gate takes both steps itself: it collects the objects, checks
that each has the bytes its id stands for and the children its bytes name, and only then
passes the reply on. What reaches the SuperLink is true, whoever sent it.
"""

from __future__ import annotations

import math
import secrets
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO

from flwr_safedshb.deployment.gate.connections import RefusedError
from flwr_safedshb.deployment.gate.limits import Limits
from flwr_safedshb.flower import fleet
from flwr_safedshb.flower.fleet import fleet_pb2, message_pb2

# Messages that a node may have open; Flower's SuperNode has one.
_MAX_OPEN = 16
# Up to here a reply is kept in memory, beyond in a file that has no name.
_MAX_IN_MEMORY = 2**20


@dataclass(eq=False)
class Asked:
    """A message that a node has been given, and what it may do for it."""

    metadata: message_pb2.Metadata
    objects: set[str]
    pulled_bytes: int = 0
    answered: bool = False

    def pulled(self, size: int) -> None:
        """Count what the node was sent of it."""
        self.pulled_bytes += size


@dataclass(eq=False)
class Staged:
    """A reply of which objects are still to come."""

    session: str
    asked: Asked
    request: fleet_pb2.PushMessagesRequest
    children: dict[str, list[str]]
    max_bytes: int
    missing: set[str]
    file: IO[bytes]
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    size: int = 0

    def put(self, request: message_pb2.PushObjectRequest) -> bool:
        """Take an object; True if it was the last one that was missing."""
        name, content = request.object_id, request.object_content
        if name not in self.children:
            raise RefusedError(400, "an object that the reply does not have")
        if name not in self.missing:
            return False
        if self.size + len(content) > self.max_bytes:
            raise RefusedError(413, "a reply that is larger than what it answers")
        if fleet.object_id(content) != name:
            raise RefusedError(400, "an object whose bytes are not those of its id")
        try:
            head = fleet.head(content)
            root = name == self.request.messages_list[0].metadata.message_id
            if root and not _same(
                fleet.root_metadata(content), self.request.messages_list[0].metadata
            ):
                raise ValueError("a message that says something else inside")
        except ValueError as error:
            raise RefusedError(400, str(error)) from error
        if head.children != self.children[name]:
            raise RefusedError(400, "an object with other children than were named")
        self.places[name] = (self.file.seek(0, 2), len(content))
        self.file.write(content)
        self.size += len(content)
        self.missing.discard(name)
        return not self.missing

    def content(self, name: str) -> bytes:
        """Return the bytes of an object."""
        start, size = self.places[name]
        self.file.seek(start)
        return self.file.read(size)


class Desk:
    """What one node has been asked, and the reply it is sending."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._asked: OrderedDict[str, Asked] = OrderedDict()
        self._staged: Staged | None = None

    def ask(self, given: fleet_pb2.PullMessagesResponse) -> None:
        """Remember the messages that the node is given."""
        trees = given.message_object_trees
        for message, tree in zip(given.messages_list, trees, strict=True):
            objects = {part.object_id for part, _ in fleet.walk(tree)}
            name = message.metadata.message_id
            self._asked[name] = Asked(message.metadata, objects)
            while len(self._asked) > _MAX_OPEN:
                self._asked.popitem(last=False)

    def asked(self, name: str) -> Asked:
        """Return a message that the node has been given."""
        if name not in self._asked:
            raise RefusedError(404, "a message that this node was not given")
        return self._asked[name]

    def holding(self, name: str) -> Asked:
        """Return a message that the node has been given and an object is part of."""
        for asked in reversed(self._asked.values()):
            if name in asked.objects:
                return asked
        raise RefusedError(404, "an object of no message that this node was given")

    def stage(
        self, request: fleet_pb2.PushMessagesRequest
    ) -> fleet_pb2.PushMessagesResponse:
        """Begin a reply in place of one that was not completed."""
        asked, children = self._checked(request)
        if self._staged is not None:
            self._staged.file.close()
        self._staged = Staged(
            secrets.token_hex(16),
            asked,
            request,
            children,
            2 * asked.pulled_bytes + self._limits.reply_bytes,
            set(children),
            tempfile.SpooledTemporaryFile(_MAX_IN_MEMORY),  # noqa: SIM115
        )
        return fleet_pb2.PushMessagesResponse(
            reconnect=fleet_pb2.Reconnect(reconnect=5),
            results={request.messages_list[0].metadata.message_id: 0},
            objects_to_push=list(children),
            session_id=self._staged.session,
        )

    def staged(self, request: message_pb2.PushObjectRequest) -> Staged:
        """Return the reply that an object belongs to."""
        staged = self._staged
        if staged is None or staged.session != request.session_id:
            raise RefusedError(404, "an object of no reply of this node")
        if request.run_id != staged.asked.metadata.run_id:
            raise RefusedError(400, "an object of another run")
        return staged

    def finish(self, staged: Staged) -> None:
        """Drop a reply that has been passed on, or cannot be."""
        staged.file.close()
        if self._staged is staged:
            self._staged = None

    def _checked(
        self, request: fleet_pb2.PushMessagesRequest
    ) -> tuple[Asked, dict[str, list[str]]]:
        """Return what a push replies to, and the children of each of its objects."""
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise RefusedError(400, "a push that is not one message")
        message, tree = request.messages_list[0], request.message_object_trees[0]
        said = message.metadata
        asked = self.asked(said.reply_to_message_id)
        names = (said.src_node_id, said.dst_node_id)
        if names != (request.node.node_id, fleet.SERVER):
            raise RefusedError(400, "a reply in another's name, or not to the server")
        same = ("run_id", "message_type", "group_id")
        if any(getattr(said, n) != getattr(asked.metadata, n) for n in same):
            raise RefusedError(400, "a reply to another question")
        if asked.answered:
            raise RefusedError(400, "a second reply to one message")
        if message.content.ByteSize() or tree.object_id != said.message_id:
            raise RefusedError(400, "a message with more or other parts than its tree")
        times = request.clientapp_runtime_list
        if len(times) > 1 or any(not (math.isfinite(t) and t >= 0) for t in times):
            raise RefusedError(400, "a time that is not a number")
        return asked, self._children(tree, asked)

    def _children(
        self, tree: message_pb2.ObjectTree, asked: Asked
    ) -> dict[str, list[str]]:
        most = 2 * len(asked.objects) + self._limits.tree_objects
        children: dict[str, list[str]] = {}
        for count, (part, depth) in enumerate(fleet.walk(tree), start=1):
            if count > most or depth > self._limits.tree_depth:
                raise RefusedError(413, "a reply of more objects than what it answers")
            mine = [child.object_id for child in part.children]
            if not fleet.is_object_id(part.object_id):
                raise RefusedError(400, "an object without a proper id")
            if children.setdefault(part.object_id, mine) != mine:
                raise RefusedError(400, "an object with two kinds of children")
        return children


def _same(inside: message_pb2.Metadata, said: message_pb2.Metadata) -> bool:
    """Compare metadata; the object of a message cannot hold its own id."""
    expected = message_pb2.Metadata()
    expected.CopyFrom(said)
    expected.message_id = ""
    return inside == expected


def pushes(
    staged: Staged, answer: fleet_pb2.PushMessagesResponse
) -> Iterator[message_pb2.PushObjectRequest]:
    """Yield the calls that bring a reply's objects to the SuperLink."""
    for name in answer.objects_to_push:
        if name in staged.children:
            yield message_pb2.PushObjectRequest(
                node=staged.request.node,
                run_id=staged.asked.metadata.run_id,
                object_id=name,
                object_content=staged.content(name),
                session_id=answer.session_id,
            )
