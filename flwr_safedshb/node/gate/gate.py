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
from collections import OrderedDict
from contextlib import nullcontext
from logging import INFO, WARNING, getLogger

import httpx
from google.protobuf.message import Message

from flwr_safedshb.flower import fleet
from flwr_safedshb.flower.fleet import fleet_pb2
from flwr_safedshb.node.gate.ask import Ask, Node
from flwr_safedshb.node.gate.call import Call, RefusedError
from flwr_safedshb.node.gate.connections import Door
from flwr_safedshb.node.gate.limits import Limits, Pace, Room
from flwr_safedshb.node.gate.objects import Objects
from flwr_safedshb.node.gate.signature import NotSignedError, signer
from flwr_safedshb.node.gate.wire import Answer, Spool

LOG = getLogger("safedshb.gate")
_PREFIX = "/v1/fleet/"
_OBJECTS = ("pull-object", "push-object")
_SECONDS = 60.0
# Keys that are remembered; those of a federation are a few hundred at most.
_MAX_KEYS = 10_000
_WAITING_TOGETHER = 10
_REPORT_SECONDS = 60.0


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
        self._known: OrderedDict[str, Node] = OrderedDict()
        self._unknown: dict[str, Node] = {}
        self._strangers = asyncio.Semaphore(self.limits.node_calls)
        # Of bodies and of answers; a call may wait for the latter with the former.
        self._bodies = Room(self.limits.node_buffered_bytes)
        self._answers = Room(self.limits.node_buffered_bytes)
        self.objects = Objects(self.limits.kept_bytes)
        self._introductions = Pace(self.limits.introductions)
        self._calls = Pace(self.limits.calls)
        self._objects = Pace(self.limits.object_calls)
        self._fetches = asyncio.Semaphore(self.limits.node_calls)
        self._large = asyncio.Semaphore(self.limits.large_calls)
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
            await (self._objects if name in _OBJECTS else self._calls).turn(owner)
            self._check_words(name, call, node)
        elif call.size > self.limits.unknown_body_bytes:
            raise RefusedError(413, "a large call of a key that is not known yet")
        else:
            await self._introductions.turn(call.connection.address)
            stranger = Node("", self._strangers, self.limits)
            node = self._unknown.setdefault(owner, stranger)
        node.under_way += 1
        try:
            return await self._answer(name, call, node, owner)
        finally:
            node.under_way -= 1
            if not node.under_way:
                self._unknown.pop(owner, None)

    def _check_words(self, name: str, call: Call, node: Node) -> None:
        """Refuse a long call that brings no object, before it is read.

        Two bytes stand for an empty message, which takes fifty in memory: megabytes of
        them would take hundreds, and the gate for seconds.
        """
        most = self.limits.unknown_body_bytes
        if name != "push-object" and call.size > most + node.desk.head_bytes():
            raise RefusedError(413, "a long call that brings no object")

    async def _answer(self, name: str, call: Call, node: Node, owner: str) -> Answer:
        await call.held.enter_async_context(self._bodies.held(node.owner, call.size))
        body = await call.body()
        large = call.size > self.limits.unknown_body_bytes
        async with self._large if large else nullcontext():
            request = _read(name, body)
            number = fleet.caller(request)
            if None not in (number, node.number) and number != node.number:
                raise RefusedError(400, "a call in the name of another node")
            answer = await Ask(self, node, call)(name, request)
        if answer.status < 400:
            if number is None:  # an activation: the answer says who it is
                found = fleet_pb2.ActivateNodeResponse.FromString(answer.content())
                number = found.node_id
            node.number = number
            if owner not in self._known:
                self._learn(owner, node)
            self.door.belongs(call.connection, owner)
        return answer

    def _learn(self, owner: str, node: Node) -> None:
        """Remember a key that the SuperLink has accepted."""
        LOG.log(INFO, "Node %s has come in, with key %s...", node.number, owner[:12])
        node.owner, node.calls = owner, asyncio.Semaphore(self.limits.node_calls)
        self._known[owner] = node
        while len(self._known) > _MAX_KEYS:
            self._known.popitem(last=False)

    async def pass_on(
        self, node: Node, call: Call, name: str, request: Message
    ) -> Answer:
        """Make a call of the SuperLink; a node has a few of them at a time."""
        async with node.calls:
            return await self._asked(call, name, request, node.owner)

    async def fetch(self, call: Call, name: str, request: Message) -> Answer:
        """Make a call for all nodes: what slows one of them does not slow it."""
        async with self._fetches:
            return await self._asked(call, name, request, None)

    async def make_room(self, owner: str, call: Call, size: int) -> None:
        """Wait until an answer may go to a node, which has room for a few at a time."""
        if size > self.limits.unknown_body_bytes:
            await call.held.enter_async_context(self._answers.held(owner, size))

    async def _asked(
        self, call: Call, name: str, request: Message, owner: str | None
    ) -> Answer:
        passed = {k: v for k, v in call.headers.items() if k in fleet.REQUEST_HEADERS}
        body = Spool()
        call.held.callback(body.close)
        try:
            async with self._inside.stream(
                "POST",
                f"{_PREFIX}{name}",
                content=request.SerializeToString(deterministic=True),
                headers=passed,
            ) as found:
                if owner is not None:
                    size = int(found.headers.get("content-length", 0))
                    await self.make_room(owner, call, size)
                async for piece in found.aiter_bytes():
                    body.add(piece)
        except httpx.HTTPError as error:
            raise RefusedError(502, "the SuperLink does not answer") from error
        headers = tuple(
            (key, value)
            for key, value in found.headers.items()
            if key.lower() in fleet.ANSWER_HEADERS
        )
        return Answer(found.status_code, body, headers)

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

    def is_alone(self, call: Call) -> bool:
        """Say whether a call comes over the only connection of its node."""
        return self.door.is_alone(call.connection)

    def announce_work(self) -> None:
        """Wake those who wait for work."""
        self._work.set()
        self._work = asyncio.Event()


def _read(name: str, body: Spool) -> Message:
    try:
        return fleet.parsed(name, body.content())
    except ValueError as error:
        raise RefusedError(400, str(error)) from error
