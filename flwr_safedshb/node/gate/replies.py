"""Replies on their way in: complete and consistent before the SuperLink hears of them.

Flower registers the tree of a reply first and takes its objects afterwards. So a node
could register an object that another will send, with false children, and that other's
message would be refused; or announce a reply whose objects never come, and the server
would wait for it. The gate takes both steps itself: it collects the objects, checks
that each has the bytes its id stands for and the children its bytes name, and only then
passes the reply on. What reaches the SuperLink is true, whoever sent it, and no larger
than the server's own question explains.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from flwr_safedshb.flower import fleet
from flwr_safedshb.flower import inline_objects as envelope
from flwr_safedshb.flower.fleet import fleet_pb2, message_pb2
from flwr_safedshb.node.gate.call import RefusedError
from flwr_safedshb.node.gate.limits import Limits
from flwr_safedshb.node.gate.sizes import Part, Sizes, measured, put_together
from flwr_safedshb.node.gate.wire import Spool

# Messages that a node may have open; Flower's SuperNode has one.
_MAX_OPEN = 16
# Bytes that name an object in a tree: its hash, and where it begins and ends.
_NAME_BYTES = 96


@dataclass(eq=False)
class Asked:
    """A message that a node has been given, and what it may do for it.

    Attributes
    ----------
    inside : dict of str to bytes
        Objects that came in an envelope; if there are any, its server opens them too.
    """

    metadata: message_pb2.Metadata
    objects: list[str]
    inside: dict[str, bytes] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    given: float = field(default_factory=time.monotonic)
    answered: bool = False

    def pulled(self, name: str, answer: bytes) -> None:
        """Take note of an object that the node was sent."""
        if name in self.parts:
            return
        found = message_pb2.PullObjectResponse.FromString(answer)
        if found.object_available:
            self.parts[name] = _asked(found.object_content)

    @property
    def received(self) -> bool:
        """Whether the node has all of it."""
        return {*self.objects} <= {*self.parts}

    def sizes(self) -> Sizes:
        """Return how large it is, as far as the node has pulled it."""
        return put_together(self.parts)


@dataclass(eq=False)
class Staged:
    """A reply of which objects are still to come.

    Attributes
    ----------
    delivery : Lock
        Held by who passes it on.
    tries : int
        How often that was tried.
    over : bool
        Whether the SuperLink has it, or has refused it for good.
    """

    session: str
    asked: Asked
    request: fleet_pb2.PushMessagesRequest
    children: dict[str, list[str]]
    most: Sizes
    spool: Spool = field(default_factory=Spool)
    parts: dict[str, Part] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    delivery: asyncio.Lock = field(default_factory=asyncio.Lock)
    tries: int = 0
    over: bool = False

    def answer(self) -> fleet_pb2.PushMessagesResponse:
        """Return what its node is told: which objects to push."""
        return fleet_pb2.PushMessagesResponse(
            reconnect=fleet_pb2.Reconnect(reconnect=5),
            results={self.request.messages_list[0].metadata.message_id: 0},
            objects_to_push=[name for name in self.children if name not in self.parts],
            session_id=self.session,
        )

    @property
    def complete(self) -> bool:
        """Whether no object is missing."""
        return len(self.parts) == len(self.children)

    def is_begun_by(self, request: fleet_pb2.PushMessagesRequest) -> bool:
        """Say whether a push is the one that began it, come again in an envelope."""
        mine = self.request.messages_list[0].metadata.message_id
        return self.complete and [mine] == [
            each.metadata.message_id
            for each in request.messages_list
            if each.content.items
        ]

    def put(self, name: str, content: bytes) -> None:
        """Take an object; what has been taken already may come again."""
        if name not in self.children:
            raise RefusedError(400, "an object that the reply does not have")
        if name in self.parts:
            return
        if self.spool.size + len(content) > self.most.arrays + self.most.words:
            raise RefusedError(413, "a reply that is larger than what it answers")
        if fleet.object_id(content) != name:
            raise RefusedError(400, "an object whose bytes are not those of its id")
        try:
            part = measured(content)
            said = self.request.messages_list[0]
            if name == said.metadata.message_id and not _same(content, said):
                raise ValueError("a message that says something else inside")
        except ValueError as error:
            raise RefusedError(400, str(error)) from error
        if part.children != self.children[name]:
            raise RefusedError(400, "an object with other children than were named")
        if len(self.parts) + 1 == len(self.children):
            self._check_whole({**self.parts, name: part})
        self.places[name] = self.spool.add(content)
        self.parts[name] = part

    def _check_whole(self, parts: dict[str, Part]) -> None:
        sizes = put_together(parts)
        if sizes.arrays > self.most.arrays or sizes.words > self.most.words:
            raise RefusedError(413, "a reply that becomes larger than what it answers")

    def end(self) -> None:
        """Let go of the bytes: nothing more is to be done."""
        self.over = True
        self.spool.close()

    def content(self, name: str) -> bytes:
        """Return the bytes of an object."""
        return self.spool.content(self.places[name], self.parts[name].size)


class Desk:
    """What one node has been asked, and the reply it is sending."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._asked: OrderedDict[str, Asked] = OrderedDict()
        self._staged: Staged | None = None

    def ask(self, given: fleet_pb2.PullMessagesResponse) -> None:
        """Remember the messages that the node is given, and open their envelopes."""
        trees = given.message_object_trees
        for message, tree in zip(given.messages_list, trees, strict=True):
            # It stays in the head, for nodes that look there; others pull objects.
            inside = envelope.opened(message) or {}
            if inside:
                tree.CopyFrom(envelope.whole_tree(tree.object_id, inside))
            objects = [part.object_id for part, _ in fleet.walk(tree)]
            name = message.metadata.message_id
            parts = {each: _asked(content) for each, content in inside.items()}
            self._asked[name] = Asked(message.metadata, objects, inside, parts)
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

    def unanswered(self) -> list[message_pb2.Metadata]:
        """Return the messages that the node was given and has not answered."""
        return [each.metadata for each in self._asked.values() if not each.answered]

    def stage(self, request: fleet_pb2.PushMessagesRequest) -> Staged:
        """Begin a reply in place of one that was not completed, or find it again."""
        staged = self._staged
        if staged is not None and staged.is_begun_by(request):
            return staged
        asked = self._checked(request)
        if staged is not None:
            if staged.delivery.locked():
                raise RefusedError(503, "a reply while another is passed on")
            staged.spool.close()
        most = self._most(asked)
        children = self._children(request.message_object_trees[0], most.objects)
        try:
            inside = envelope.opened(request.messages_list[0], len(children)) or {}
        except ValueError as error:
            raise RefusedError(413, str(error)) from error
        envelope.empty(request.messages_list[0])
        self._staged = Staged(secrets.token_hex(16), asked, request, children, most)
        for name, content in inside.items():
            self._staged.put(name, content)
        return self._staged

    def _most(self, asked: Asked) -> Sizes:
        """Return how large a reply may be."""
        asking, more = asked.sizes(), self._limits.reply_bytes
        objects = max(asking.objects, len(asked.objects))
        return Sizes(
            2 * asking.arrays + more,
            2 * asking.words + more,
            2 * objects + self._limits.tree_objects,
        )

    def head_bytes(self) -> int:
        """Return how many bytes a reply's tree and envelope may take."""
        objects = [self._most(asked).objects for asked in self._asked.values()]
        return _NAME_BYTES * max(objects) + envelope.MOST if objects else 0

    def staged(self, request: message_pb2.PushObjectRequest) -> Staged:
        """Return the reply that an object belongs to."""
        staged = self._staged
        if staged is None or staged.session != request.session_id:
            raise RefusedError(404, "an object of no reply of this node")
        if request.run_id != staged.asked.metadata.run_id:
            raise RefusedError(400, "an object of another run")
        return staged

    def _checked(self, request: fleet_pb2.PushMessagesRequest) -> Asked:
        """Return what a push replies to."""
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
        records = [item.key for item in message.content.items]
        if records not in ([], [envelope.NAME]) or tree.object_id != said.message_id:
            raise RefusedError(400, "a message with more or other parts than its tree")
        times = request.clientapp_runtime_list
        numbers = (said.created_at, said.ttl, *times)
        if len(times) > 1 or any(not (math.isfinite(n) and n >= 0) for n in numbers):
            raise RefusedError(400, "a time that is not a number")
        if times:  # nobody works for longer than since they were asked
            times[0] = min(times[0], time.monotonic() - asked.given)
        return asked

    def _children(
        self, tree: message_pb2.ObjectTree, count: int
    ) -> dict[str, list[str]]:
        children: dict[str, list[str]] = {}
        for number, (part, depth) in enumerate(fleet.walk(tree), start=1):
            if number > count or depth > self._limits.tree_depth:
                raise RefusedError(413, "a reply of more objects than what it answers")
            mine = [child.object_id for child in part.children]
            if not fleet.is_object_id(part.object_id):
                raise RefusedError(400, "an object without a proper id")
            if children.setdefault(part.object_id, mine) != mine:
                raise RefusedError(400, "an object with two kinds of children")
        return children


def _asked(content: bytes) -> Part:
    """Return what an object of the server's own is: it may be larger than a node's."""
    try:
        return measured(content)
    except ValueError:
        return Part([], len(content), False, Counter())


def _same(content: bytes, said: message_pb2.Message) -> bool:
    """Compare a message's object, which cannot hold its own id, with its words."""
    expected = message_pb2.Message()
    expected.CopyFrom(said)
    expected.metadata.message_id = ""
    inside = fleet.root(content)
    for message in (expected, inside):  # the object of what has content says nothing
        message.ClearField("content")
    return bool(inside == expected)
