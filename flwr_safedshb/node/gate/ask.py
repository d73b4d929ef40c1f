"""What the gate makes of each call of a node."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Protocol, cast

from google.protobuf.message import Message

from flwr_safedshb.flower import fleet
from flwr_safedshb.flower.fleet import (
    fab_pb2,
    fleet_pb2,
    heartbeat_pb2,
    message_pb2,
)
from flwr_safedshb.node.flower_patches.fleet_client import NodeProto, given_up
from flwr_safedshb.node.gate.call import Call, RefusedError
from flwr_safedshb.node.gate.delivery import outgoing, pushes
from flwr_safedshb.node.gate.limits import Limits
from flwr_safedshb.node.gate.objects import Objects, is_coming
from flwr_safedshb.node.gate.replies import Desk, Staged
from flwr_safedshb.node.gate.wire import Answer

# Times that a SuperLink may fail over one reply.
_MAX_TRIES = 4
_LOST = "the node was started again, and its message is lost"
Headers = tuple[tuple[str, str], ...]
_PROTOBUF: Headers = (("content-type", "application/protobuf"),)


class Node:
    """A key, the node that it belongs to, and what that node is doing.

    Attributes
    ----------
    owner : str
        The key's hash, once the SuperLink has accepted a call; before that all unknown
        keys are one owner.
    calls : Semaphore
        Calls of the SuperLink at a time; all unknown keys share one.
    number : int, optional
        The node's id, once the SuperLink has accepted a call.
    waits : object, optional
        The call for work that is held; a newer one takes its place.
    """

    def __init__(self, owner: str, calls: asyncio.Semaphore, limits: Limits) -> None:
        self.owner, self.calls = owner, calls
        self.number: int | None = None
        self.desk = Desk(limits)
        self.under_way = 0
        self.waits: object | None = None


class Inside(Protocol):
    """The SuperLink, as the gate reaches it for a node."""

    limits: Limits
    objects: Objects

    async def pass_on(
        self, node: Node, call: Call, name: str, request: Message
    ) -> Answer:
        """Make a call of the SuperLink."""

    async def fetch(self, call: Call, name: str, request: Message) -> Answer:
        """Make a call of the SuperLink for all nodes."""

    async def make_room(self, owner: str, call: Call, size: int) -> None:
        """Wait until an answer may go to a node."""

    async def wait_for_work(self, seconds: float) -> None:
        """Wait, or until some node was given work."""

    def announce_work(self) -> None:
        """Wake those who wait for work."""

    def is_alone(self, call: Call) -> bool:
        """Say whether a call comes over the only connection of its node."""


class Ask:
    """One call of one node."""

    def __init__(self, inside: Inside, node: Node, call: Call) -> None:
        self._inside, self._node, self._call = inside, node, call

    async def __call__(self, name: str, request: Message) -> Answer:
        """Answer the call."""
        desk = self._node.desk
        match request:
            case fleet_pb2.PullMessagesRequest():
                return await self._pull(request)
            case fleet_pb2.PushMessagesRequest():
                staged = desk.stage(request)
                await self._pass_on(staged)
                return _written(staged.answer())
            case message_pb2.PushObjectRequest():
                return await self._push(request)
            case message_pb2.PullObjectRequest():
                return await self._pull_object(request)
            case message_pb2.ConfirmMessageReceivedRequest():
                asked = desk.asked(request.message_object_id)
                # Which deletes it, perhaps before the server has sent all of it.
                if not asked.received:
                    raise RefusedError(400, "a message that has not come yet")
                if {*asked.objects} <= {*asked.inside}:
                    return _written(message_pb2.ConfirmMessageReceivedResponse())
                request.run_id = asked.metadata.run_id
            case fleet_pb2.ActivateNodeRequest():
                return await self._activate(request)
            case heartbeat_pb2.SendNodeHeartbeatRequest():
                request.heartbeat_interval = _patience(request.heartbeat_interval)
            case fab_pb2.GetFabRequest():
                # The SuperLink writes it into its log as it is.
                if not fleet.is_object_id(request.hash_str):
                    raise RefusedError(400, "an app without a proper hash")
        return await self._through(name, request)

    async def _through(self, name: str, request: Message) -> Answer:
        return await self._inside.pass_on(self._node, self._call, name, request)

    async def _activate(self, request: fleet_pb2.ActivateNodeRequest) -> Answer:
        """Let a node in, at once also after it was killed.

        Flower takes who was killed for connected until two heartbeats are missing, and
        lets nobody else in under that key. Whose connections are gone is not connected.
        And a SuperNode that starts knows nothing of what the one before was given: that
        is answered for it, or the server would wait until the round is over.
        """
        request.heartbeat_interval = _patience(request.heartbeat_interval)
        answer = await self._through("activate-node", request)
        if self._node.number is None:
            return answer
        if answer.status >= 400 and self._inside.is_alone(self._call):
            leave = fleet_pb2.DeactivateNodeRequest(node_id=self._node.number)
            await self._through("deactivate-node", leave)
            answer = await self._through("activate-node", request)
        if answer.status < 400:
            for asked in self._node.desk.unanswered():
                # The server may not wait for it any more.
                with suppress(RefusedError):
                    await self._give_up(asked)
        return answer

    async def _give_up(self, asked: message_pb2.Metadata) -> None:
        error = given_up(asked, _LOST)
        request = fleet_pb2.PushMessagesRequest(
            node=NodeProto(node_id=asked.dst_node_id),
            messages_list=[error.message],
            message_object_trees=[error.tree],
        )
        staged = self._node.desk.stage(request)
        for name, content in error.objects.items():
            staged.put(name, content)
        await self._deliver(staged)

    async def _pull(self, request: fleet_pb2.PullMessagesRequest) -> Answer:
        until = time.monotonic() + self._inside.limits.hold_seconds
        mine = self._node.waits = object()
        while True:
            answer = await self._through("pull-messages", request)
            if answer.status >= 400:
                return answer
            given = fleet_pb2.PullMessagesResponse.FromString(answer.content())
            if given.messages_list:
                self._node.desk.ask(given)
                self._inside.announce_work()
                return _written(given, answer.headers)
            last = self._node.number is None or time.monotonic() >= until
            if last or self._node.waits is not mine:
                return answer
            await self._inside.wait_for_work(self._inside.limits.poll_seconds)
            if self._call.gone():  # what is pulled for nobody would be lost
                raise RefusedError(499, "a node that hung up while it waited")

    async def _pull_object(self, request: message_pb2.PullObjectRequest) -> Answer:
        asked, name = self._node.desk.holding(request.object_id), request.object_id
        if name in asked.inside:
            found = message_pb2.PullObjectResponse(
                object_found=True,
                object_available=True,
                object_content=asked.inside[name],
            )
            answer = _written(found)
        else:
            request.run_id = asked.metadata.run_id
            answer = await self._inside.objects.get(
                name, lambda: self._fetched(request)
            )
        if answer.status < 400:
            asked.pulled(name, answer.content())
        await self._inside.make_room(self._node.owner, self._call, answer.size)
        return answer

    async def _fetched(self, request: message_pb2.PullObjectRequest) -> Answer:
        """Return an object once the server has sent it; a node would wait longer."""
        until = time.monotonic() + self._inside.limits.object_seconds
        while True:
            answer = await self._inside.fetch(self._call, "pull-object", request)
            late = time.monotonic() >= until or self._call.gone()
            if late or not is_coming(answer):
                return answer
            await asyncio.sleep(self._inside.limits.poll_seconds)

    async def _push(self, request: message_pb2.PushObjectRequest) -> Answer:
        staged = self._node.desk.staged(request)
        if not staged.over:
            staged.put(request.object_id, request.object_content)
        await self._pass_on(staged)
        return _written(message_pb2.PushObjectResponse(stored=True))

    async def _pass_on(self, staged: Staged) -> None:
        if staged.complete:
            async with staged.delivery:
                if not staged.over:
                    await self._deliver(staged)

    async def _deliver(self, staged: Staged) -> None:
        """Pass a complete reply on, as its node would have.

        If the SuperLink fails, the node may try its last object again a few times: the
        same bytes are sent, and nothing is paid for twice.
        """
        staged.tries += 1
        staged.asked.answered = True
        begun = outgoing(staged)
        answer = await self._sent("push-messages", begun, staged)
        taken = fleet_pb2.PushMessagesResponse.FromString(answer)
        for request in pushes(staged, begun, taken):
            await self._sent("push-object", request, staged)
        staged.end()
        staged.asked.inside.clear()

    async def _sent(self, name: str, request: Message, staged: Staged) -> bytes:
        answer = await self._through(name, request)
        if answer.status < 400:
            return answer.content()
        again = answer.status >= 500 and staged.tries < _MAX_TRIES
        if not again:
            staged.end()
        status = 503 if again else answer.status
        raise RefusedError(status, "a reply that the SuperLink refused")


def _patience(interval: float) -> float:
    # Who leaves without a word is waited for twice as long.
    return min(interval, fleet.HEARTBEAT_SECONDS)


def _written(message: Message, headers: Headers = _PROTOBUF) -> Answer:
    return Answer(200, cast(bytes, message.SerializeToString()), headers)
