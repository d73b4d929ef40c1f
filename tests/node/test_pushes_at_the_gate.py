"""A push gets through if it is one reply, of its own node, to what that was asked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from flwr_safedshb.flower.object_tree import parse_head, walk_tree
from flwr_safedshb.node.flower_patches.fleet_api import fleet_pb2, message_pb2
from flwr_safedshb.node.gate.limits import Limits
from tests.node.gates import RUN, Node, Place, question, reply, visited
from tests.node.test_gate import asked


def two_messages(request: Any) -> None:
    request.messages_list.append(request.messages_list[0])


def two_trees(request: Any) -> None:
    request.message_object_trees.append(request.message_object_trees[0])


def content_inside(request: Any) -> None:
    record = request.messages_list[0].content.items.add()
    record.key = "arrays"


def another_root(request: Any) -> None:
    request.message_object_trees[0].object_id = "0" * 64


def many_objects(request: Any) -> None:
    tree = request.message_object_trees[0]
    tree.children.extend(ObjectTree(object_id=f"{i:064x}") for i in range(3000))


def deep_tree(request: Any) -> None:
    tree = request.message_object_trees[0]
    for i in range(12):
        tree = tree.children.add()
        tree.object_id = f"{i:064x}"


def odd_id(request: Any) -> None:
    request.message_object_trees[0].children.add().object_id = "../x"


def endless_step(request: Any) -> None:
    request.clientapp_runtime_list[0] = float("nan")


def in_another_name(request: Any) -> None:
    request.messages_list[0].metadata.src_node_id = 6


def as_the_server(request: Any) -> None:
    request.messages_list[0].metadata.src_node_id = 1
    request.messages_list[0].metadata.reply_to_message_id = ""


def to_another_node(request: Any) -> None:
    request.messages_list[0].metadata.dst_node_id = 6


def in_another_run(request: Any) -> None:
    request.messages_list[0].metadata.run_id = RUN_OF_OTHERS


def of_another_kind(request: Any) -> None:
    request.messages_list[0].metadata.message_type = "evaluate"


def to_nothing(request: Any) -> None:
    request.messages_list[0].metadata.reply_to_message_id = "0" * 64


RUN_OF_OTHERS = 78


@pytest.mark.parametrize(
    "change",
    [
        two_messages,
        two_trees,
        content_inside,
        another_root,
        many_objects,
        deep_tree,
        odd_id,
        endless_step,
        in_another_name,
        as_the_server,
        to_another_node,
        in_another_run,
        of_another_kind,
        to_nothing,
    ],
)
def test_a_forged_push_does_not_get_through(
    change: Callable[[Any], None], tmp_path: Path
) -> None:
    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            answer = reply(await asked(place, node))
            found = await node.announce(answer, change)
            assert 400 <= found.status_code < 500
            assert "push-messages" not in place.superlink.names()

    visited(tmp_path, visit)


def test_a_reply_to_what_another_was_asked_does_not_get_through(
    tmp_path: Path,
) -> None:
    async def visit(place: Place) -> None:
        async with place.node(5) as honest, place.node(6) as hostile:
            message = await asked(place, honest)
            stolen = reply(message, src_node_id=6)
            assert (await hostile.announce(stolen)).status_code == 404
            root = message.metadata.message_id
            assert (await hostile.pull_object(root)).status_code == 404
            confirm = message_pb2.ConfirmMessageReceivedRequest(
                node=hostile.proto(), run_id=1, message_object_id=root
            )
            found = await hostile.call("confirm-message-received", confirm)
            assert found.status_code == 404
            assert "confirm-message-received" not in place.superlink.names()
            # Its own key does not open another's name.
            hostile.number = 5
            beat = fleet_pb2.PullMessagesRequest(node=hostile.proto())
            found = await hostile.call("pull-messages", beat)
            assert found.status_code == 400

    visited(tmp_path, visit)


def test_what_has_not_come_is_not_confirmed(tmp_path: Path) -> None:
    """To confirm a message deletes it, while the server may still be sending it."""

    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            message = question(5)
            place.superlink.waiting[5] = [message]
            await node.pull()
            sent, place.superlink.objects = place.superlink.objects, {}
            for name, content in sent.items():
                assert (await node.confirm(message.object_id)).status_code == 400
                place.superlink.objects[name] = content
            assert "confirm-message-received" not in place.superlink.names()
            for _ in range(2):  # the answer to the first may be lost
                assert (await node.confirm(message.object_id)).status_code == 200

    visited(tmp_path, visit)


def test_what_a_node_has_from_before_it_need_not_pull(tmp_path: Path) -> None:
    """Flower's SuperNode pulls only the objects that it lacks."""

    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            message = question(5)
            place.superlink.waiting[5] = [message]
            await node.pull()
            assert (await node.confirm(message.object_id)).status_code == 200

    superlink = visited(tmp_path, visit)
    assert superlink.names()[-1] == "confirm-message-received"


async def announced(place: Place, node: Node) -> tuple[str, dict[str, bytes]]:
    answer = reply(await asked(place, node))
    found = await node.announce(answer)
    told = fleet_pb2.PushMessagesResponse.FromString(found.content)
    parts = {n: p.deflate() for n, p in get_all_nested_objects(answer).items()}
    return told.session_id, parts


def test_an_object_is_what_its_id_and_its_bytes_say(tmp_path: Path) -> None:
    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            session, parts = await announced(place, node)
            name = next(iter(parts))
            leaf = next(n for n, each in parts.items() if not parse_head(each).children)
            # As long as before, and with the same head: only the hash tells.
            altered = parts[leaf][:-1] + bytes([parts[leaf][-1] ^ 1])
            of_another_run = message_pb2.PushObjectRequest(
                node=node.proto(),
                run_id=RUN + 1,
                object_id=name,
                object_content=parts[name],
                session_id=session,
            )
            for refused in (
                await node.push_object(session, leaf, altered),
                await node.call("push-object", of_another_run),
                await node.push_object(session, name, parts[name] + b"x"),
                await node.push_object(session, name, b""),
                await node.push_object(session, "0" * 64, b"x"),
                await node.push_object("other", name, parts[name]),
            ):
                assert 400 <= refused.status_code < 500
            assert "push-messages" not in place.superlink.names()

    visited(tmp_path, visit)


def test_children_are_those_that_the_bytes_name(tmp_path: Path) -> None:
    """Whoever registers an id with false children would poison it for its owner."""

    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            answer = reply(await asked(place, node))
            parts = get_all_nested_objects(answer)
            leaf = next(n for n, part in parts.items() if not part.children)

            def poison(request: Any) -> None:
                for part, _ in walk_tree(request.message_object_trees[0]):
                    if part.object_id == leaf:
                        part.children.add().object_id = "a" * 64

            found = await node.announce(answer, poison)
            told = fleet_pb2.PushMessagesResponse.FromString(found.content)
            done = await node.push_object(told.session_id, leaf, parts[leaf].deflate())
            assert done.status_code == 400
            assert "push-messages" not in place.superlink.names()

    visited(tmp_path, visit)


def test_a_message_says_the_same_inside(tmp_path: Path) -> None:
    """The server reads the object, the SuperLink what is written beside it."""

    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            answer = reply(await asked(place, node), src_node_id=6)

            def outside(request: Any) -> None:
                request.messages_list[0].metadata.src_node_id = 5

            found = await node.announce(answer, outside)
            assert found.status_code == 200, found.text
            told = fleet_pb2.PushMessagesResponse.FromString(found.content)
            root = answer.metadata.message_id
            done = await node.push_object(told.session_id, root, answer.deflate())
            assert done.status_code == 400
            assert "push-messages" not in place.superlink.names()

    visited(tmp_path, visit)


def test_a_reply_is_not_much_larger_than_what_it_answers(tmp_path: Path) -> None:
    limits = Limits(hold_seconds=0.05, poll_seconds=0.01, reply_bytes=1000)

    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            answer = reply(await asked(place, node), size=4000)
            found = await node.announce(answer)
            told = fleet_pb2.PushMessagesResponse.FromString(found.content)
            sizes = {n: p.deflate() for n, p in get_all_nested_objects(answer).items()}
            name = max(sizes, key=lambda n: len(sizes[n]))
            done = await node.push_object(told.session_id, name, sizes[name])
            assert done.status_code == 413

    visited(tmp_path, visit, limits)
