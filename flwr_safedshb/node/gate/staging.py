"""Replies on their way in: complete and consistent before the SuperLink sees them.

Flower registers the tree of a reply first and takes its objects afterwards. So a node
could register an object that another will send, with false children, and that other's
message would be refused; or announce a reply whose objects never come, and the server
would wait for it. The gate stages each reply instead: it collects the objects, checks
that each has the bytes its id stands for and the children its bytes name, and only then
delivers the reply. What reaches the SuperLink is consistent, whoever sent it, and no
larger than the server's question explains.

All of it is on disk as well, for a gate that is started again in between.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import IO

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
from flwr_safedshb.node.gate.journal import Journal, QuestionRow, ReplyRow
from flwr_safedshb.node.gate.limits import Limits
from flwr_safedshb.node.gate.message_size import (
    MessageSize,
    ObjectPart,
    measure_message,
    measure_object,
    measure_servers_object,
)
from flwr_safedshb.node.gate.request import RejectedError

# Messages that a node may have open; Flower's SuperNode has one.
_MAX_OPEN = 8
# How often a message is given again to a node that asks for work and has not received
# it: the answer that brought it was lost with the gate or the proxy.
_MAX_GIVEN = 3
# Bytes that name an object in a tree: its hash, and where it begins and ends.
_NAME_BYTES = 96

# Finds an object of the server's that has been there, by its id.
FindPart = Callable[[str], ObjectPart | None]


class Question:
    """A message that a node was given, and what has come of it.

    Attributes
    ----------
    given : PullMessagesResponse
        The call that gives it; once it is received, no more than its metadata.
    objects : frozenset of str
        The ids of its objects.
    inline : dict of str to bytes
        Objects that came inline; if there are any, its server reads them too.
    max_size : MessageSize, optional
        How large the reply may be; known once the node has received the question.
    """

    def __init__(self, row: QuestionRow) -> None:
        self.given = fleet_pb2.PullMessagesResponse.FromString(row.given)
        (message,), (tree,) = self.given.messages_list, self.given.message_object_trees
        self.metadata: message_pb2.Metadata = message.metadata
        self.inline = inlining.read_inline(message) or {}
        self.reads_inline = inlining.read_inline(message) is not None
        self.objects = frozenset(part.object_id for part, _ in walk_tree(tree))
        self.given_at, self.max_size = row.given_at, row.max_size
        self.is_answered = row.is_answered
        self.times_given = 0

    def make_row(self) -> QuestionRow:
        """Return what a later gate must know."""
        content = self.given.SerializeToString()
        return QuestionRow(content, self.given_at, self.max_size, self.is_answered)

    def measure(self, limits: Limits, find_part: FindPart) -> MessageSize:
        """Return how large a reply may be, given the objects that have been there."""
        if self.max_size is not None:
            return self.max_size
        parts = {
            name: measure_servers_object(self.inline[name])
            if name in self.inline
            else find_part(name)
            for name in self.objects
        }
        size = measure_message({n: part for n, part in parts.items() if part})
        return MessageSize(
            2 * size.array_bytes + limits.reply_bytes,
            2 * size.other_bytes + limits.reply_bytes,
            2 * max(size.objects, len(self.objects)) + limits.tree_objects,
        )

    def shrink(self) -> None:
        """Free what is of no use once the node has received it."""
        (message,) = self.given.messages_list
        inlining.remove_inline(message)
        if self.reads_inline:
            inlining.attach_inline(message, {})
        del self.given.message_object_trees[0].children[:]
        self.inline, self.objects = {}, frozenset()


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

    def __init__(
        self,
        row: ReplyRow,
        question: Question,
        limits: Limits,
        max_size: MessageSize,
        folder: Path,
    ) -> None:
        self.session, self.question, self._push = row.session, question, row.push
        self.request = fleet_pb2.PushMessagesRequest.FromString(row.push)
        (self.head,), (tree,) = (
            self.request.messages_list,
            self.request.message_object_trees,
        )
        self._max_size, self._folder = max_size, folder
        self.children = _check_tree(tree, max_size.objects, limits.tree_depth)
        self.parts: dict[str, ObjectPart] = {}
        self._size = 0
        self.delivery = asyncio.Lock()
        self.tries, self.is_over = 0, row.is_over
        try:
            self._inline = inlining.read_inline(self.head, len(self.children)) or {}
        except ValueError as error:
            raise RejectedError(413, str(error)) from error
        inlining.remove_inline(self.head)
        for name, content in self._inline.items():
            self.add_object(name, content)

    def make_row(self) -> ReplyRow:
        """Return what a later gate must know."""
        return ReplyRow(self.session, self._push, self.is_over)

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
        is_here = self.is_complete or self.is_over
        return is_here and pushed == [self.head.metadata.message_id]

    def add_object(self, name: str, content: bytes) -> None:
        """Check an object and keep it; idempotent."""
        if name not in self.children:
            raise RejectedError(400, "an object that the reply does not have")
        if name in self.parts:
            return
        max_bytes = self._max_size.array_bytes + self._max_size.other_bytes
        if self._size + len(content) > max_bytes:
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
        if name not in self._inline and not (self._folder / name).exists():
            unfinished = self._folder / f".{name}"
            unfinished.write_bytes(content)
            os.replace(unfinished, self._folder / name)
        self._size += len(content)
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
            size.array_bytes > self._max_size.array_bytes
            or size.other_bytes > self._max_size.other_bytes
        ):
            raise RejectedError(413, "a reply that becomes larger than its question")

    def open_object(self, name: str) -> IO[bytes]:
        """Return a file with the bytes of an object."""
        if name in self._inline:
            return BytesIO(self._inline[name])
        return (self._folder / name).open("rb")

    def _read_object(self, name: str) -> bytes:
        with self.open_object(name) as file:
            return file.read()

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
        if self.question.reads_inline:
            small = {
                name: self._read_object(name)
                for name, part in self.parts.items()
                if part.children or part.size <= inlining.MAX_OBJECT_BYTES
            }
            inline = inlining.select_inline(tree.object_id, small)
        if inline:
            tree.CopyFrom(inlining.prune_tree(tree, inline))
        inlining.attach_inline(head, inline or {})
        return request

    def list_pushes(
        self,
        first: fleet_pb2.PushMessagesRequest,
        response: fleet_pb2.PushMessagesResponse,
    ) -> list[str]:
        """Return the objects that the SuperLink lacks after the first call."""
        inline = inlining.read_inline(first.messages_list[0]) or {}
        wanted = response.objects_to_push
        return [name for name in wanted if name in self.children and name not in inline]

    def make_push(self, name: str, session: str) -> message_pb2.PushObjectRequest:
        """Return the call that pushes an object, without its bytes."""
        return message_pb2.PushObjectRequest(
            node=self.request.node,
            run_id=self.question.metadata.run_id,
            object_id=name,
            session_id=session,
        )


class StagingArea:
    """What one node has been asked, and the reply it is sending.

    Parameters
    ----------
    owner : str
        The hash of the node's key.
    limits : Limits
    journal : Journal
    folder : Path
        For the objects of the reply.
    find_part : callable
    """

    def __init__(
        self,
        owner: str,
        limits: Limits,
        journal: Journal,
        folder: Path,
        find_part: FindPart,
    ) -> None:
        self._owner, self._limits, self._journal = owner, limits, journal
        self._folder, self._find_part = folder, find_part
        self._questions: OrderedDict[str, Question] = OrderedDict()
        self._staged: StagedReply | None = None
        for row in journal.read_questions(owner):
            question = Question(row)
            self._questions[question.metadata.message_id] = question
        if (reply := journal.read_reply(owner)) is not None:
            self._restore(reply)

    def _restore(self, row: ReplyRow) -> None:
        """Read the reply that a gate before this one has staged."""
        push = fleet_pb2.PushMessagesRequest.FromString(row.push)
        name = push.messages_list[0].metadata.reply_to_message_id
        question = self._questions.get(name)
        if question is None:
            return
        with suppress(RejectedError):  # nobody knows any more how large it may be
            self._staged = self._make_staged(row, question)
            for path in [] if row.is_over else self._folder.iterdir():
                if is_object_id(path.name):
                    self._staged.add_object(path.name, path.read_bytes())

    def add_question(self, given: fleet_pb2.PullMessagesResponse) -> Question:
        """Remember a message that the node is given, and complete its tree.

        Inline objects stay in the head, for nodes that read them; others pull objects.
        """
        (message,), (tree,) = given.messages_list, given.message_object_trees
        if inline := inlining.read_inline(message):
            tree.CopyFrom(inlining.rebuild_tree(tree.object_id, inline))
        row = QuestionRow(given.SerializeToString(), time.time(), None, False)
        question = Question(row)
        self._questions[question.metadata.message_id] = question
        self._save(question)
        while len(self._questions) > _MAX_OPEN:
            dropped, _ = self._questions.popitem(last=False)
            self._journal.drop_question(self._owner, dropped)
        return question

    def _save(self, question: Question) -> None:
        message_id = question.metadata.message_id
        self._journal.save_question(self._owner, message_id, question.make_row())

    def give_again(self) -> Question | None:
        """Return a message that the node was given and has not received."""
        for question in self._questions.values():
            is_lost = question.max_size is None and not question.is_answered
            if is_lost and question.times_given < _MAX_GIVEN:
                question.times_given += 1
                return question
        return None

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

    def note_received(self, question: Question) -> None:
        """Note that the node has all of a message, whose objects have been there."""
        question.max_size = question.measure(self._limits, self._find_part)
        question.shrink()
        self._save(question)

    def stage_reply(self, request: fleet_pb2.PushMessagesRequest) -> StagedReply:
        """Stage a reply in place of an incomplete one, or find it if it is retried."""
        staged = self._staged
        if staged is not None and staged.is_retried_by(request):
            return staged
        question = self._check_push(request)
        if staged is not None and staged.delivery.locked():
            raise RejectedError(503, "a reply while another is delivered")
        self._staged = None
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        push = request.SerializeToString()
        row = ReplyRow(secrets.token_hex(16), push, False)
        self._staged = staged = self._make_staged(row, question)
        self._journal.save_reply(self._owner, row)
        return staged

    def _make_staged(self, row: ReplyRow, question: Question) -> StagedReply:
        max_size = question.measure(self._limits, self._find_part)
        return StagedReply(row, question, self._limits, max_size, self._folder)

    def note_answered(self, question: Question) -> None:
        """Note that a reply to a message is on its way to the SuperLink."""
        question.is_answered = True
        self._save(question)

    def end_reply(self, staged: StagedReply) -> None:
        """Free a reply: the SuperLink has it, or has refused it for good."""
        staged.is_over = True
        staged.question.shrink()
        self._save(staged.question)
        self._journal.save_reply(self._owner, staged.make_row())
        shutil.rmtree(self._folder, ignore_errors=True)

    def find_undelivered(self) -> StagedReply | None:
        """Return the reply whose delivery has begun and is not over, if there is one.

        So it is if the gate was killed meanwhile.
        """
        staged = self._staged
        has_begun = staged and staged.question.is_answered and not staged.is_over
        return staged if has_begun else None

    def max_head_bytes(self) -> int:
        """Return how many bytes a reply's tree and inline objects may take."""
        names = [
            q.max_size.objects if q.max_size else 2 * len(q.objects)
            for q in self._questions.values()
            if not q.is_answered
        ]
        tree = max(names, default=0) + self._limits.tree_objects
        return _NAME_BYTES * tree + inlining.MAX_INLINE_BYTES

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
            since = max(time.time() - question.given_at, 0.0)
            runtimes[0] = min(runtimes[0], since)
        return question


def _check_tree(
    tree: message_pb2.ObjectTree, max_objects: int, max_depth: int
) -> dict[str, list[str]]:
    """Return the objects of a tree, each with its children."""
    children: dict[str, list[str]] = {}
    for number, (part, depth) in enumerate(walk_tree(tree), start=1):
        if number > max_objects or depth > max_depth:
            raise RejectedError(413, "a reply of more objects than its question")
        names = [child.object_id for child in part.children]
        if not is_object_id(part.object_id):
            raise RejectedError(400, "an object without a proper id")
        if children.setdefault(part.object_id, names) != names:
            raise RejectedError(400, "an object with two kinds of children")
    return children
