"""The gate reads inline objects, sends them, and checks each of them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.proto import recorddict_pb2
from google.protobuf.message import Message as Proto

from flwr_safedshb.flower import inline_objects as inlining
from flwr_safedshb.flower.object_tree import walk_tree
from flwr_safedshb.node.flower_patches.fleet_api import (
    PackedMessage,
    fleet_pb2,
    message_pb2,
    pack_message,
)
from tests.node.gates import Node, Place, SuperLink, question, reply, visited
from tests.node.test_gate import asked
from tests.node.test_replies_at_the_gate import sent


@dataclass(repr=False)
class Enveloping(SuperLink):
    """A SuperLink whose server inlines objects; it fails over the first replies."""

    failures: int = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        answer = await super().__call__(request)
        if self.names()[-1] == "push-messages" and self.failures:
            self.failures -= 1
            return httpx.Response(500)
        return answer

    def _answer(self, asked: Proto, node: int) -> Proto:
        answer = super()._answer(asked, node)
        if isinstance(answer, fleet_pb2.PullMessagesResponse):
            trees = answer.message_object_trees
            for head, tree in zip(answer.messages_list, trees, strict=True):
                inside = inlining.select_inline(tree.object_id, self.objects)
                assert inside is not None
                inlining.attach_inline(head, inside)
                tree.CopyFrom(inlining.prune_tree(tree, inside))
            self.objects.clear()
        return answer


def came(superlink: SuperLink) -> fleet_pb2.PushMessagesRequest:
    """Return the reply that reached the SuperLink."""
    (found,) = [call for name, call, _ in superlink.calls if name == "push-messages"]
    assert isinstance(found, fleet_pb2.PushMessagesRequest)
    return found


def test_flowers_own_node_is_told_in_its_own_form(tmp_path: Path) -> None:
    """And what it answers object by object reaches the server inline."""

    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            message = await asked(place, node)
            request = message_pb2.ConfirmMessageReceivedRequest(
                node=node.proto(), message_object_id=message.metadata.message_id
            )
            found = await node.call("confirm-message-received", request)
            assert found.status_code == 200
            answers.append(pack_message(reply(message)))
            found = await sent(node, answers[0])
            assert found.status_code == 200, found.text

    answers: list[PackedMessage] = []
    superlink = visited(tmp_path, visit, superlink=Enveloping())
    assert superlink.names() == ["activate-node", "pull-messages", "push-messages"]
    found = came(superlink)
    assert inlining.read_inline(found.messages_list[0]) == answers[0].objects
    assert not found.message_object_trees[0].children


def test_a_reply_may_come_with_inline_objects(tmp_path: Path) -> None:
    """A server that has sent none is answered in Flower's form, and told of them."""

    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            answers.append(pack_message(reply(await asked(place, node))))
            inlining.attach_inline(answers[0].message, answers[0].objects)
            found = await sent(
                node, PackedMessage(answers[0].message, answers[0].tree, {})
            )
            assert found.status_code == 200

    answers: list[PackedMessage] = []
    superlink = visited(tmp_path, visit)
    found = came(superlink)
    assert inlining.read_inline(found.messages_list[0]) == {}
    assert found.message_object_trees[0] == answers[0].tree
    pushed = {
        call.object_id: call.object_content
        for _, call, _ in superlink.calls
        if isinstance(call, message_pb2.PushObjectRequest)
    }
    assert pushed == answers[0].objects


def test_the_largest_inline_reply_gets_through(tmp_path: Path) -> None:
    """A call that brings no object by itself may be short only, but for its head."""

    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            question = await asked(place, node)
            arrays = [
                np.full(inlining.MAX_OBJECT_BYTES // 4 - 64, n, "f4") for n in range(8)
            ]
            content = RecordDict({"arrays": ArrayRecord(arrays)})
            answer = pack_message(Message(content, reply_to=question))
            inside = inlining.select_inline(answer.tree.object_id, answer.objects)
            assert inside is not None
            assert sum(map(len, inside.values())) > 0.7 * inlining.MAX_INLINE_BYTES
            inlining.attach_inline(answer.message, inside)
            found = await sent(node, answer)
            assert found.status_code == 200, found.text

    superlink = visited(tmp_path, visit, superlink=Enveloping())
    assert superlink.names().count("push-object") == 5


def stranger(request: Any) -> None:
    inlining.attach_inline(request.messages_list[0], {"": b"ArrayChunk  1\0x"})


def many(request: Any) -> None:
    inside = {str(n): b"ArrayChunk  8\0%08d" % n for n in range(100)}
    inlining.attach_inline(request.messages_list[0], inside)


def large(request: Any) -> None:
    inlining.attach_inline(
        request.messages_list[0], {"": bytes(2 * inlining.MAX_INLINE_BYTES)}
    )


def words(request: Any) -> None:
    item = recorddict_pb2.RecordDict.Item(key="more")
    content = recorddict_pb2.RecordDict(items=[item])
    request.messages_list[0].content.CopyFrom(content)


@pytest.mark.parametrize(
    ("change", "status"), [(stranger, 400), (many, 413), (large, 413), (words, 400)]
)
def test_inline_objects_are_checked_like_others(
    change: Callable[[Any], None], status: int, tmp_path: Path
) -> None:
    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            answer = reply(await asked(place, node))
            assert (await node.announce(answer, change)).status_code == status

    superlink = visited(tmp_path, visit, superlink=Enveloping())
    assert "push-messages" not in superlink.names()


def test_a_reply_that_the_superlink_failed_over_may_come_again(tmp_path: Path) -> None:
    """As Flower's SuperNode sends it again; and once it is taken it is taken once."""

    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            answer = pack_message(reply(await asked(place, node)))
            inlining.attach_inline(answer.message, answer.objects)
            for status in (503, 200, 200):
                assert (await _pushed(node, answer)).status_code == status

    superlink = visited(tmp_path, visit, superlink=Enveloping(failures=1))
    assert superlink.names().count("push-messages") == 2


async def _pushed(node: Node, answer: PackedMessage) -> httpx.Response:
    request = fleet_pb2.PushMessagesRequest(
        node=node.proto(),
        messages_list=[answer.message],
        message_object_trees=[answer.tree],
    )
    return await node.call("push-messages", request)


def test_objects_that_the_server_is_still_sending_are_waited_for(
    tmp_path: Path,
) -> None:
    """Flower's SuperNode would sleep for a second, and ask again."""

    class Late(SuperLink):
        left = 3

        def _answer(self, asked: Proto, node: int) -> Proto:
            answer = super()._answer(asked, node)
            if isinstance(answer, message_pb2.PullObjectResponse) and self.left:
                self.left -= 1
                return message_pb2.PullObjectResponse(object_found=True)
            return answer

    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            message = question(node.number)
            place.superlink.waiting[node.number] = [message]
            given = await node.pull()
            for part, _ in walk_tree(given.message_object_trees[0]):
                found = await node.pull_object(part.object_id)
                told = message_pb2.PullObjectResponse.FromString(found.content)
                assert told.object_available

    visited(tmp_path, visit, superlink=Late())
