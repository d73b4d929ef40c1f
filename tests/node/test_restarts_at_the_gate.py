"""A node that was killed comes back at once, and nobody waits for what it lost."""

from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from google.protobuf.message import Message as Proto

from flwr_safedshb.flower.compat import ErrorCode
from flwr_safedshb.node.flower_patches.fleet_api import fleet_pb2, pack_message
from tests.node.gates import Node, Place, SuperLink, question, reply, visited
from tests.node.test_replies_at_the_gate import sent

ME = 5


@dataclass(repr=False)
class Patient(SuperLink):
    """A SuperLink that takes who has not left for connected, as Flower's does."""

    connected: set[int] = field(default_factory=set)

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/activate-node") and ME in self.connected:
            self.calls.append(("refused", fleet_pb2.ActivateNodeRequest(), {}))
            return httpx.Response(409, text="could not be activated")
        return await super().__call__(request)

    def _answer(self, asked: Proto, node: int) -> Proto:
        if isinstance(asked, fleet_pb2.ActivateNodeRequest):
            self.connected.add(node)
        if isinstance(asked, fleet_pb2.DeactivateNodeRequest):
            self.connected.discard(node)
        return super()._answer(asked, node)

    def pushed(self) -> list[Proto]:
        found = [r for name, r, _ in self.calls if name == "push-messages"]
        return [message for request in found for message in request.messages_list]


async def another(stack: AsyncExitStack, place: Place, node: Node) -> Node:
    """Return the same node over a connection of its own."""
    link = httpx.AsyncClient(
        base_url=node.link.base_url, verify=place.trusted, trust_env=False
    )
    await stack.enter_async_context(link)
    return Node(link, node.number, node.key)


def test_who_was_killed_comes_back_at_once(tmp_path: Path) -> None:
    async def visit(place: Place) -> None:
        async with AsyncExitStack() as stack, place.node(ME) as node:
            await node.link.aclose()  # as a kill does
            again = await another(stack, place, node)
            assert (await again.activate()).status_code == 200
            assert not (await again.pull()).messages_list

    names = visited(tmp_path, visit, superlink=Patient()).names()
    leaving = ["refused", "deactivate-node", "activate-node"]
    assert names[:4] == ["activate-node", *leaving]


def test_nobody_else_comes_in_while_a_node_is_connected(tmp_path: Path) -> None:
    async def visit(place: Place) -> None:
        async with AsyncExitStack() as stack, place.node(ME) as node:
            place.superlink.waiting[ME] = [question(ME)]
            given = (await node.pull()).messages_list
            assert given
            again = await another(stack, place, node)
            assert (await again.activate()).status_code == 409

    superlink = Patient()
    names = visited(tmp_path, visit, superlink=superlink).names()
    assert "deactivate-node" not in names
    assert superlink.pushed() == []


def test_what_a_killed_node_was_given_is_answered_for_it(tmp_path: Path) -> None:
    first, second = question(ME), question(ME, size=4)

    async def visit(place: Place) -> None:
        async with AsyncExitStack() as stack, place.node(ME) as node:
            place.superlink.waiting[ME] = [first, second]
            for asked in (first, second):
                await node.pull()
                assert (await node.confirm(asked.object_id)).status_code == 200
            answer = reply(first)
            found = await node.announce(answer)
            assert found.status_code == 200  # and no object of it comes
            await node.link.aclose()
            again = await another(stack, place, node)
            assert (await again.activate()).status_code == 200
            late = await again.announce(answer)
            assert late.status_code == 400
            assert late.text == "a second reply to one message"

    superlink = Patient()
    visited(tmp_path, visit, superlink=superlink)
    for asked, told in zip((first, second), superlink.pushed(), strict=True):
        about = told.metadata
        assert about.reply_to_message_id == asked.metadata.message_id
        assert (about.src_node_id, about.dst_node_id) == (ME, 1)
        assert told.error.code == ErrorCode.CLIENT_APP_CRASHED
        assert told.error.reason.startswith("the node was started again")
        assert about.message_id in superlink.objects


def test_a_reply_that_was_sent_is_not_taken_back(tmp_path: Path) -> None:
    asked = question(ME)

    async def visit(place: Place) -> None:
        async with AsyncExitStack() as stack, place.node(ME) as node:
            place.superlink.waiting[ME] = [asked]
            await node.pull()
            sending = await sent(node, pack_message(reply(asked)))
            assert sending.status_code == 200
            await node.link.aclose()
            again = await another(stack, place, node)
            assert (await again.activate()).status_code == 200

    superlink = Patient()
    visited(tmp_path, visit, superlink=superlink)
    (told,) = superlink.pushed()
    assert not told.HasField("error")
