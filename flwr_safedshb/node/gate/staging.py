"""Replies on their way in: complete and consistent before the SuperLink sees them.

Flower registers the tree of a reply first and takes its objects afterwards. So a node
could register an object that another will send, with false children, and that other's
message would be refused; or announce a reply whose objects never come, and the server
would wait for it. The gate stages each reply instead: it collects the objects, checks
that each has the bytes its id stands for and the children its bytes name, and only then
delivers the reply. What reaches the SuperLink is consistent, whoever sent it, and no
larger than the server's question explains.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from flwr_safedshb.flower import inline_objects as inlining
from flwr_safedshb.flower.object_tree import (
    hash_object,
    is_object_id,
    parse_root,
    walk_tree,
)
from flwr_safedshb.node.flower_patches.fleet_api import (
    SUPERLINK,
    fleet_pb2,
    message_pb2,
)
from flwr_safedshb.node.gate.http import RejectedError, Response, SpooledBody
from flwr_safedshb.node.gate.limits import Limits
from flwr_safedshb.node.gate.message_size import (
    MessageSize,
    ObjectPart,
    measure_message,
    measure_object,
)
from flwr_safedshb.node.gate.object_cache import parse_object

# Messages that a node may have open; Flower's SuperNode has one.
_MAX_OPEN = 16
# Bytes that name an object in a tree: its hash, and where it begins and ends.
_NAME_BYTES = 96


@dataclass(eq=False)
class Question:
    """A message that a node was given, and what it has pulled of it.

    Attributes
    ----------
    objects : list of str
        The ids of its objects.
    inline : dict of str to bytes
        Objects that came inline; if there are any, its server reads them too.
    parts : dict of str to ObjectPart
        Objects that the node has.
    """

    metadata: message_pb2.Metadata
    objects: list[str]
    inline: dict[str, bytes]
    parts: dict[str, ObjectPart]
    given_at: float = field(default_factory=time.monotonic)
    is_answered: bool = False

    def note_pulled(self, name: str, response: Response) -> None:
        """Note that the node is sent the response to its call for an object."""
        if name in self.parts:
            return
        found = parse_object(response)
        if found is not None and found.object_available:
            self.parts[name] = _measure_servers_object(found.object_content)

    @property
    def is_received(self) -> bool:
        """Whether the node has all of it."""
        return {*self.objects} <= {*self.parts}

    def max_reply_size(self, limits: Limits) -> MessageSize:
        """Return how large a reply may be, given what the node has pulled."""
        size = measure_message(self.parts)
        return MessageSize(
            2 * size.array_bytes + limits.reply_bytes,
            2 * size.other_bytes + limits.reply_bytes,
            2 * max(size.objects, len(self.objects)) + limits.tree_objects,
        )


@dataclass(eq=False)
class StagedReply:
    """A reply whose objects are still coming.

    Attributes
    ----------
    children : dict of str to list of str
        The objects of the reply's tree, and their children.
    delivery : Lock
        Held by whoever delivers it.
    tries : int
        How often that was tried.
    is_over : bool
        Whether the SuperLink has it, or has refused it for good.
    """

    session: str
    question: Question
    request: fleet_pb2.PushMessagesRequest
    children: dict[str, list[str]]
    max_size: MessageSize
    body: SpooledBody = field(default_factory=SpooledBody)
    parts: dict[str, ObjectPart] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    delivery: asyncio.Lock = field(default_factory=asyncio.Lock)
    tries: int = 0
    is_over: bool = False

    @property
    def head(self) -> message_pb2.Message:
        """The message without its objects."""
        head: message_pb2.Message = self.request.messages_list[0]
        return head

    @property
    def is_complete(self) -> bool:
        """Whether no object is missing."""
        return len(self.parts) == len(self.children)

    def missing_objects(self) -> fleet_pb2.PushMessagesResponse:
        """Return what the node is told: which objects to push."""
        return fleet_pb2.PushMessagesResponse(
            reconnect=fleet_pb2.Reconnect(reconnect=5),
            results={self.head.metadata.message_id: 0},
            objects_to_push=[name for name in self.children if name not in self.parts],
            session_id=self.session,
        )

    def is_retried_by(self, request: fleet_pb2.PushMessagesRequest) -> bool:
        """Return True if a push with inline objects is the one that staged this."""
        pushed = [
            each.metadata.message_id
            for each in request.messages_list
            if each.content.items
        ]
        return self.is_complete and pushed == [self.head.metadata.message_id]

    def add_object(self, name: str, content: bytes) -> None:
        """Check an object and keep it; idempotent."""
        if name not in self.children:
            raise RejectedError(400, "an object that the reply does not have")
        if name in self.parts:
            return
        max_bytes = self.max_size.array_bytes + self.max_size.other_bytes
        if self.body.size + len(content) > max_bytes:
            raise RejectedError(413, "a reply that is larger than its question allows")
        if hash_object(content) != name:
            raise RejectedError(400, "an object whose bytes do not have its id")
        try:
            part = measure_object(content)
            if name == self.head.metadata.message_id and not self._is_root(content):
                raise ValueError("a message whose root states something else")
        except ValueError as error:
            raise RejectedError(400, str(error)) from error
        if part.children != self.children[name]:
            raise RejectedError(400, "an object with other children than were named")
        if len(self.parts) + 1 == len(self.children):
            self._check_size({**self.parts, name: part})
        self.starts[name] = self.body.append(content)
        self.parts[name] = part

    def _is_root(self, content: bytes) -> bool:
        """Compare a root object, which cannot hold its own id, with the head."""
        expected = message_pb2.Message()
        expected.CopyFrom(self.head)
        expected.metadata.message_id = ""
        root = parse_root(content)
        for message in (expected, root):  # a root never holds the content
            message.ClearField("content")
        return bool(root == expected)

    def _check_size(self, parts: dict[str, ObjectPart]) -> None:
        size = measure_message(parts)
        if (
            size.array_bytes > self.max_size.array_bytes
            or size.other_bytes > self.max_size.other_bytes
        ):
            raise RejectedError(413, "a reply that becomes larger than its question")

    def read_object(self, name: str) -> bytes:
        """Return the bytes of an object."""
        return self.body.read(self.starts[name], self.parts[name].size)

    def first_push(self) -> fleet_pb2.PushMessagesRequest:
        """Return the call that starts the delivery of a complete reply.

        It has inline objects if the question had; else it states that they are read.
        """
        request = fleet_pb2.PushMessagesRequest()
        request.CopyFrom(self.request)
        (head,), (tree,) = request.messages_list, request.message_object_trees
        if head.HasField("error"):
            return request
        inline = None
        if self.question.inline:
            small = {
                name: self.read_object(name)
                for name, part in self.parts.items()
                if part.children or part.size <= inlining.MAX_OBJECT_BYTES
            }
            inline = inlining.select_inline(tree.object_id, small)
        if inline:
            tree.CopyFrom(inlining.prune_tree(tree, inline))
        inlining.attach_inline(head, inline or {})
        return request

    def object_pushes(
        self,
        first: fleet_pb2.PushMessagesRequest,
        response: fleet_pb2.PushMessagesResponse,
    ) -> Iterator[message_pb2.PushObjectRequest]:
        """Yield the calls that push the objects which the SuperLink lacks."""
        inline = inlining.read_inline(first.messages_list[0]) or {}
        for name in response.objects_to_push:
            if name in self.children and name not in inline:
                yield message_pb2.PushObjectRequest(
                    node=self.request.node,
                    run_id=self.question.metadata.run_id,
                    object_id=name,
                    object_content=self.read_object(name),
                    session_id=response.session_id,
                )

    def free(self) -> None:
        """Free the bytes: nothing more is to be done."""
        self.is_over = True
        self.body.close()


class StagingArea:
    """What one node has been asked, and the reply it is sending."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._questions: OrderedDict[str, Question] = OrderedDict()
        self._staged: StagedReply | None = None

    def add_questions(self, given: fleet_pb2.PullMessagesResponse) -> None:
        """Remember messages that the node is given, and complete their trees.

        Inline objects stay in the head, for nodes that read them; others pull objects.
        """
        trees = given.message_object_trees
        for message, tree in zip(given.messages_list, trees, strict=True):
            inline = inlining.read_inline(message) or {}
            if inline:
                tree.CopyFrom(inlining.rebuild_tree(tree.object_id, inline))
            objects = [part.object_id for part, _ in walk_tree(tree)]
            parts = {n: _measure_servers_object(each) for n, each in inline.items()}
            question = Question(message.metadata, objects, inline, parts)
            self._questions[message.metadata.message_id] = question
            while len(self._questions) > _MAX_OPEN:
                self._questions.popitem(last=False)

    def find_question(self, message_id: str) -> Question:
        """Return a message that the node has been given."""
        if message_id not in self._questions:
            raise RejectedError(404, "a message that this node was not given")
        return self._questions[message_id]

    def find_question_with(self, object_id: str) -> Question:
        """Return the latest message of the node that has an object."""
        for question in reversed(self._questions.values()):
            if object_id in question.objects:
                return question
        raise RejectedError(404, "an object of no message that this node was given")

    def find_unanswered(self) -> list[message_pb2.Metadata]:
        """Return the messages that the node was given and has not answered."""
        return [q.metadata for q in self._questions.values() if not q.is_answered]

    def stage_reply(self, request: fleet_pb2.PushMessagesRequest) -> StagedReply:
        """Stage a reply in place of an incomplete one, or find it if it is retried."""
        staged = self._staged
        if staged is not None and staged.is_retried_by(request):
            return staged
        question = self._check_push(request)
        if staged is not None:
            if staged.delivery.locked():
                raise RejectedError(503, "a reply while another is delivered")
            staged.body.close()
        max_size = question.max_reply_size(self._limits)
        (head,), (tree,) = request.messages_list, request.message_object_trees
        children = self._check_tree(tree, max_size.objects)
        try:
            inline = inlining.read_inline(head, len(children)) or {}
        except ValueError as error:
            raise RejectedError(413, str(error)) from error
        inlining.remove_inline(head)
        session = secrets.token_hex(16)
        staged = StagedReply(session, question, request, children, max_size)
        self._staged = staged
        for name, content in inline.items():
            staged.add_object(name, content)
        return staged

    def max_head_bytes(self) -> int:
        """Return how many bytes a reply's tree and inline objects may take."""
        sizes = [q.max_reply_size(self._limits) for q in self._questions.values()]
        if not sizes:
            return 0
        names = max(size.objects for size in sizes)
        return _NAME_BYTES * names + inlining.MAX_INLINE_BYTES

    def find_staged(self, request: message_pb2.PushObjectRequest) -> StagedReply:
        """Return the reply that an object belongs to."""
        staged = self._staged
        if staged is None or staged.session != request.session_id:
            raise RejectedError(404, "an object of no reply of this node")
        if request.run_id != staged.question.metadata.run_id:
            raise RejectedError(400, "an object of another run")
        return staged

    def _check_push(self, request: fleet_pb2.PushMessagesRequest) -> Question:
        """Check a push, and return the question that it answers."""
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise RejectedError(400, "a push that is not one message")
        message, tree = request.messages_list[0], request.message_object_trees[0]
        stated = message.metadata
        question = self.find_question(stated.reply_to_message_id)
        route = (stated.src_node_id, stated.dst_node_id)
        if route != (request.node.node_id, SUPERLINK):
            raise RejectedError(400, "a reply in another's name, or not to the server")
        same = ("run_id", "message_type", "group_id")
        if any(getattr(stated, n) != getattr(question.metadata, n) for n in same):
            raise RejectedError(400, "a reply to another question")
        if question.is_answered:
            raise RejectedError(400, "a second reply to one message")
        records = [item.key for item in message.content.items]
        inline_or_none = records in ([], [inlining.RECORD_KEY])
        if not inline_or_none or tree.object_id != stated.message_id:
            raise RejectedError(400, "a message with more or other parts than its tree")
        runtimes = request.clientapp_runtime_list
        numbers = (stated.created_at, stated.ttl, *runtimes)
        if len(runtimes) > 1 or any(not (math.isfinite(n) and n >= 0) for n in numbers):
            raise RejectedError(400, "a time that is not a number")
        if runtimes:  # nobody works for longer than since they were asked
            runtimes[0] = min(runtimes[0], time.monotonic() - question.given_at)
        return question

    def _check_tree(
        self, tree: message_pb2.ObjectTree, max_objects: int
    ) -> dict[str, list[str]]:
        """Return the objects of a tree, each with its children."""
        children: dict[str, list[str]] = {}
        for number, (part, depth) in enumerate(walk_tree(tree), start=1):
            if number > max_objects or depth > self._limits.tree_depth:
                raise RejectedError(413, "a reply of more objects than its question")
            names = [child.object_id for child in part.children]
            if not is_object_id(part.object_id):
                raise RejectedError(400, "an object without a proper id")
            if children.setdefault(part.object_id, names) != names:
                raise RejectedError(400, "an object with two kinds of children")
        return children


def _measure_servers_object(content: bytes) -> ObjectPart:
    """Measure an object of the server, which may be larger than a node's."""
    try:
        return measure_object(content)
    except ValueError:
        return ObjectPart([], len(content), False, Counter())
