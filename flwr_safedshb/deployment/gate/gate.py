"""What nodes need of a SuperLink, and nothing else, for the network to see.

A SuperLink serves three APIs on one port: Fleet for nodes, who sign every call, Control
for its operators, and Runtime for its own processes. In the free edition nobody has to
prove anything to the last two: who reaches the port can register nodes of their own and
submit runs. So the SuperLink listens on the loopback, and this gate passes on the calls
that a registered node makes.

It understands them. A node pulls only what it was given, and answers only what it was
asked, in its own name, once, and with a reply that is complete (`replies`). What goes
inside is written by the gate: path, headers and request. A call for work is held until
there is some, so that nodes hear of it at once. And nobody can take so much of the gate
that others wait (`limits`, `connections`): a node that floods it slows itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable
from logging import INFO, WARNING, getLogger
from typing import cast

import httpx
from google.protobuf.message import Message

from flwr_safedshb.deployment.gate.connections import Call, Door, RefusedError
from flwr_safedshb.deployment.gate.limits import Limits, Room
from flwr_safedshb.deployment.gate.replies import Desk, Staged, pushes
from flwr_safedshb.deployment.gate.signature import NotSignedError, signer
from flwr_safedshb.deployment.gate.wire import Answer
from flwr_safedshb.flower import fleet
from flwr_safedshb.flower.fleet import fab_pb2, fleet_pb2, message_pb2

LOG = getLogger("safedshb.gate")
_PREFIX = "/v1/fleet/"
_SECONDS = 60.0
# Keys that are remembered; those of a federation are a few hundred at most.
_MAX_KEYS = 10_000
_WAITING_TOGETHER = 10
_REPORT_SECONDS = 60.0


class _Node:
    """A key, the node that it belongs to, and what that node is doing.

    Attributes
    ----------
    calls : Semaphore
        Calls of the SuperLink at a time; all unknown keys share one.
    number : int, optional
        The node's id, once the SuperLink has accepted a call.
    """

    def __init__(self, calls: asyncio.Semaphore, limits: Limits) -> None:
        self.calls = calls
        self.number: int | None = None
        self.desk = Desk(limits)
        self.under_way = 0


class Gate:
    """The gate of a SuperLink.

    Parameters
    ----------
    superlink : str
        Its address, host:port.
    trusted : SSLContext
        Which certificates it may show.
    shown : SSLContext
        The certificate that the gate shows.
    limits : Limits, optional
    transport : optional
        In place of the network, for tests.
    """

    def __init__(
        self,
        superlink: str,
        trusted: ssl.SSLContext,
        shown: ssl.SSLContext,
        limits: Limits | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.limits = Limits() if limits is None else limits
        self.door = Door(self.answer, self.limits, shown)
        self._inside = httpx.AsyncClient(
            base_url=f"https://{superlink}",
            verify=trusted,
            timeout=_SECONDS,
            transport=transport,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
        )
        self._known: OrderedDict[str, _Node] = OrderedDict()
        self._unknown: dict[str, _Node] = {}
        self._strangers = asyncio.Semaphore(self.limits.node_calls)
        self._room = Room(self.limits.buffered_bytes, self.limits.node_buffered_bytes)
        self._work = asyncio.Event()
        self._waiting = 0

    async def serve(self, listener: socket.socket) -> None:
        """Answer calls until cancelled."""
        async with self._inside, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._report())
            tasks.create_task(self.door.serve(listener))

    async def _report(self) -> None:
        """Log what was refused, once a minute: a line each would fill the disk."""
        while True:
            await asyncio.sleep(_REPORT_SECONDS)
            if self.door.refusals:
                told = self.door.refusals.most_common(10)
                self.door.refusals.clear()
                words = "; ".join(f"{count} x {reason}" for reason, count in told)
                LOG.log(WARNING, "Refused in the last minute: %s", words)

    async def answer(self, call: Call) -> Answer:
        """Answer one call."""
        name = call.path.removeprefix(_PREFIX)
        if not call.path.startswith(_PREFIX) or name not in fleet.CALLS:
            raise RefusedError(404, "not for nodes")
        if call.method != "POST":
            raise RefusedError(405, "only POST")
        try:
            key = signer(call.headers)
        except NotSignedError as error:
            raise RefusedError(401, str(error)) from error
        self.door.advanced(call.connection)
        owner = hashlib.sha256(key).hexdigest()
        node = self._known.get(owner)
        if node is not None:
            self.door.belongs(call.connection, owner)
        elif call.size > self.limits.unknown_body_bytes:
            raise RefusedError(413, "a large call of a key that is not known yet")
        else:
            stranger = _Node(self._strangers, self.limits)
            node = self._unknown.setdefault(owner, stranger)
        node.under_way += 1
        try:
            return await self._answer(name, call, node, owner)
        finally:
            node.under_way -= 1
            if not node.under_way:
                self._unknown.pop(owner, None)

    async def _answer(self, name: str, call: Call, node: _Node, owner: str) -> Answer:
        async with self._room.held(owner if node.number else "", call.size):
            try:
                request = fleet.parsed(name, await call.body())
            except ValueError as error:
                raise RefusedError(400, str(error)) from error
            number = fleet.caller(request)
            if None not in (number, node.number) and number != node.number:
                raise RefusedError(400, "a call in the name of another node")
            passed = fleet.REQUEST_HEADERS
            headers = {k: v for k, v in call.headers.items() if k in passed}
            answer = await _Ask(self, node, headers, call.gone)(name, request)
        if answer.status < 400:
            if number is None:  # an activation: the answer says who it is
                found = fleet_pb2.ActivateNodeResponse.FromString(answer.body)
                number, node.desk = found.node_id, Desk(self.limits)
            node.number = number
            if owner not in self._known:
                self._learn(owner, node)
            self.door.belongs(call.connection, owner)
        return answer

    def _learn(self, owner: str, node: _Node) -> None:
        """Remember a key that the SuperLink has accepted."""
        LOG.log(INFO, "Node %s has come in, with key %s...", node.number, owner[:12])
        node.calls = asyncio.Semaphore(self.limits.node_calls)
        self._known[owner] = node
        while len(self._known) > _MAX_KEYS:
            self._known.popitem(last=False)

    async def pass_on(
        self, node: _Node, name: str, request: Message, headers: dict[str, str]
    ) -> httpx.Response:
        """Make a call of the SuperLink; a node has a few of them at a time."""
        async with node.calls:
            try:
                return await self._inside.post(
                    f"{_PREFIX}{name}",
                    content=request.SerializeToString(deterministic=True),
                    headers=headers,
                )
            except httpx.HTTPError as error:
                raise RefusedError(502, "the SuperLink does not answer") from error

    async def wait_for_work(self, seconds: float) -> None:
        """Wait, or until some node was given work: a round is for all of them.

        So the more wait, the longer does each: up to ten of them ask the SuperLink
        together as often as one would alone.
        """
        self._waiting += 1
        try:
            async with asyncio.timeout(seconds * min(self._waiting, _WAITING_TOGETHER)):
                await self._work.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting -= 1

    def announce_work(self) -> None:
        """Wake those who wait for work."""
        self._work.set()
        self._work = asyncio.Event()


class _Ask:
    """One call of one node, with the headers that prove whose it is."""

    def __init__(
        self,
        gate: Gate,
        node: _Node,
        headers: dict[str, str],
        gone: Callable[[], bool],
    ) -> None:
        self._gate, self._node, self._headers = gate, node, headers
        self._gone = gone

    async def __call__(self, name: str, request: Message) -> Answer:
        desk = self._node.desk
        match request:
            case fleet_pb2.PullMessagesRequest():
                return await self._pull(request)
            case fleet_pb2.PushMessagesRequest():
                return _written(desk.stage(request))
            case message_pb2.PushObjectRequest():
                return await self._push(request)
            case message_pb2.PullObjectRequest():
                asked = desk.holding(request.object_id)
                answer = await self._through(name, request)
                asked.pulled(len(answer.body))
                return answer
            case message_pb2.ConfirmMessageReceivedRequest():
                desk.asked(request.message_object_id)
            case fab_pb2.GetFabRequest():
                # The SuperLink writes it into its log as it is.
                if not fleet.is_object_id(request.hash_str):
                    raise RefusedError(400, "an app without a proper hash")
        return await self._through(name, request)

    async def _through(self, name: str, request: Message) -> Answer:
        found = await self._gate.pass_on(self._node, name, request, self._headers)
        headers = tuple(
            (key, value)
            for key, value in found.headers.items()
            if key.lower() in fleet.ANSWER_HEADERS
        )
        return Answer(found.status_code, found.content, headers)

    async def _pull(self, request: fleet_pb2.PullMessagesRequest) -> Answer:
        until = time.monotonic() + self._gate.limits.hold_seconds
        while True:
            answer = await self._through("pull-messages", request)
            if answer.status >= 400:
                return answer
            given = fleet_pb2.PullMessagesResponse.FromString(answer.body)
            if given.messages_list:
                self._node.desk.ask(given)
                self._gate.announce_work()
                return answer
            if self._node.number is None or time.monotonic() >= until:
                return answer
            await self._gate.wait_for_work(self._gate.limits.poll_seconds)
            if self._gone():  # what is pulled for nobody would be lost
                raise RefusedError(499, "a node that hung up while it waited")

    async def _push(self, request: message_pb2.PushObjectRequest) -> Answer:
        desk = self._node.desk
        staged = desk.staged(request)
        if staged.put(request):
            try:
                await self._deliver(staged)
            finally:
                desk.finish(staged)
        return _written(message_pb2.PushObjectResponse(stored=True))

    async def _deliver(self, staged: Staged) -> None:
        """Pass a complete reply on, as its node would have."""
        staged.asked.answered = True
        answer = await self._through("push-messages", staged.request)
        if answer.status >= 400:
            raise RefusedError(answer.status, "a reply that the SuperLink refused")
        taken = fleet_pb2.PushMessagesResponse.FromString(answer.body)
        for request in pushes(staged, taken):
            answer = await self._through("push-object", request)
            if answer.status >= 400:
                raise RefusedError(answer.status, "an object the SuperLink refused")


def _written(message: Message) -> Answer:
    body = cast(bytes, message.SerializeToString())
    return Answer(200, body, (("content-type", "application/protobuf"),))
