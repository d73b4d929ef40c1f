"""A node that was killed comes back at once, and nobody waits for what it lost."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from google.protobuf.message import Message as Proto

from flwr_safedshb.flower.compat import ErrorCode
from flwr_safedshb.node.flower_patches.fleet_api import (
    PackedMessage,
    fleet_pb2,
    pack_message,
)
from simulations.loopback.signing import Key, public_key_pem
from tests.guard import HANGS
from tests.node.gates import (
    QUICK,
    Node,
    Place,
    SuperLink,
    question,
    reply,
    running,
    visited,
)
from tests.node.test_replies_at_the_gate import Failing, sent

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


@asynccontextmanager
async def reached(folder: Path, superlink: SuperLink, key: Key) -> AsyncIterator[Node]:
    """Run a gate, and yield a node that has been in before."""
    async with (
        running(folder, QUICK, superlink) as place,
        httpx.AsyncClient(
            base_url=f"https://127.0.0.1:{place.port}",
            verify=place.trusted,
            trust_env=False,
            timeout=HANGS,
        ) as link,
    ):
        yield Node(link, ME, key)


def steps_of_a_round(
    asked: Message, pushed: PackedMessage
) -> list[Callable[[Node], Awaitable[httpx.Response]]]:
    """Return the calls of a node that pulls a message and pushes its reply."""
    sessions: list[str] = []

    async def pull(node: Node) -> httpx.Response:
        request = fleet_pb2.PullMessagesRequest(node=node.proto())
        found = await node.call("pull-messages", request)
        given = fleet_pb2.PullMessagesResponse.FromString(found.content)
        (message,) = given.messages_list
        assert message.metadata.message_id == asked.metadata.message_id
        return found

    async def announce(node: Node) -> httpx.Response:
        request = fleet_pb2.PushMessagesRequest(
            node=node.proto(),
            messages_list=[pushed.message],
            message_object_trees=[pushed.tree],
        )
        found = await node.call("push-messages", request)
        told = fleet_pb2.PushMessagesResponse.FromString(found.content)
        sessions.append(told.session_id)
        return found

    def push(name: str) -> Callable[[Node], Awaitable[httpx.Response]]:
        return lambda node: node.push_object(sessions[-1], name, pushed.objects[name])

    return [
        lambda node: node.activate(),
        pull,
        *(partial(Node.pull_object, name=n) for n in get_all_nested_objects(asked)),
        partial(Node.confirm, message_id=asked.metadata.message_id),
        announce,
        *map(push, pushed.objects),
    ]


def test_a_gate_that_is_killed_in_any_phase_loses_no_reply(tmp_path: Path) -> None:
    """Nothing is written when it is stopped, so it is all the same how it ends."""
    asked = question(ME)
    pushed = pack_message(reply(asked))
    steps = steps_of_a_round(asked, pushed)
    superlink = SuperLink()
    key = ec.generate_private_key(ec.SECP384R1())
    superlink.nodes[public_key_pem(key)] = ME
    superlink.waiting[ME] = [asked]

    async def story() -> None:
        for step in steps:
            # Its answer is lost with the first gate, so the call is made again.
            for _ in range(2):
                async with reached(tmp_path, superlink, key) as node:
                    found = await step(node)
                    assert found.status_code == 200, found.text

    asyncio.run(story())
    assert {n: superlink.objects[n] for n in pushed.objects} == pushed.objects
    assert superlink.names().count("push-messages") == 1


def test_a_reply_that_was_half_delivered_is_delivered_by_the_next_gate(
    tmp_path: Path,
) -> None:
    asked = question(ME)
    pushed = pack_message(reply(asked))
    *steps, last = steps_of_a_round(asked, pushed)
    superlink = Failing()
    key = ec.generate_private_key(ec.SECP384R1())
    superlink.nodes[public_key_pem(key)] = ME
    superlink.waiting[ME] = [asked]

    async def story() -> None:
        async with reached(tmp_path, superlink, key) as node:
            for step in steps:
                assert (await step(node)).status_code == 200
            superlink.failing, superlink.times = "push-object", 1
            assert (await last(node)).status_code == 503
        async with reached(tmp_path, superlink, key) as node:
            # It is not the node that comes back, but one that was started again.
            assert (await node.activate()).status_code == 200

    asyncio.run(story())
    assert {n: superlink.objects[n] for n in pushed.objects} == pushed.objects
    (first, again) = [r for n, r, _ in superlink.calls if n == "push-messages"]
    assert first == again


def test_what_a_node_did_not_receive_is_given_again_a_few_times(tmp_path: Path) -> None:
    """Until it confirms it: it may be of a run that is over."""
    asked = question(ME)

    async def visit(place: Place) -> None:
        async with place.node(ME) as node:
            place.superlink.waiting[ME] = [asked]
            given = [len((await node.pull()).messages_list) for _ in range(6)]
            assert given == [1, 1, 1, 1, 0, 0]

    visited(tmp_path, visit)
