"""The gate: a reverse proxy that lets nodes reach what they need of a SuperLink.

A SuperLink serves three APIs on one port: Fleet for nodes, who sign every call, Control
for its operators, and Runtime for its own processes. In the free edition nobody has to
prove anything to the last two: who reaches the port can register nodes of their own and
submit runs. So the SuperLink listens on the loopback, and the gate passes on the calls
that a registered node makes.

It understands them. A node pulls only what it was given, and answers only what it was
asked, in its own name, once, and with a complete reply (`staging`). The gate writes
what goes inside: path, headers and request (`backend`). A call for work is held until
there is some, so that nodes hear of it at once (`handlers`). And nobody can take so
much that others wait (`limits`, `listener`): a node that floods the gate slows itself.
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

from flwr_safedshb.node.flower_patches import fleet_api
from flwr_safedshb.node.flower_patches.fleet_api import fleet_pb2
from flwr_safedshb.node.gate.backend import PREFIX, Backend
from flwr_safedshb.node.gate.handlers import NodeSession, RequestHandler
from flwr_safedshb.node.gate.http import RejectedError, Request, Response
from flwr_safedshb.node.gate.limits import ByteQuota, Limits, RateLimiter
from flwr_safedshb.node.gate.listener import Listener
from flwr_safedshb.node.gate.signature import NotSignedError, verify_signature

LOG = getLogger("safedshb.gate")
_OBJECT_CALLS = ("pull-object", "push-object")
# Keys that are remembered; those of a federation are a few hundred at most.
_MAX_KEYS = 10_000
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
        In place of the network behind the gate, for tests.
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
        self.listener = Listener(self.handle_request, self.limits, shown)
        self.backend = Backend(superlink, trusted, self.limits, transport)
        self._known: OrderedDict[str, NodeSession] = OrderedDict()
        self._unknown: dict[str, NodeSession] = {}
        self._unknown_calls = asyncio.Semaphore(self.limits.node_calls)
        # Another than that of responses: a call with a body may wait for the latter.
        self._bodies = ByteQuota(self.limits.node_buffered_bytes)
        self._introductions = RateLimiter(self.limits.introductions)
        self._calls = RateLimiter(self.limits.calls)
        self._object_calls = RateLimiter(self.limits.object_calls)
        self._large = asyncio.Semaphore(self.limits.large_calls)

    async def serve(self, server: socket.socket) -> None:
        """Answer requests until cancelled."""
        async with self.backend.client, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._report_refusals())
            tasks.create_task(self.listener.serve(server))

    async def _report_refusals(self) -> None:
        """Log what was refused, once a minute: a line each would fill the disk."""
        while True:
            await asyncio.sleep(_REPORT_SECONDS)
            if self.listener.refusals:
                counts = self.listener.refusals.most_common(10)
                self.listener.refusals.clear()
                reasons = "; ".join(f"{count} x {reason}" for reason, count in counts)
                LOG.log(WARNING, "Refused in the last minute: %s", reasons)

    async def handle_request(self, request: Request) -> Response:
        """Answer one request: check who signed it and at what rate, then handle it."""
        name = request.path.removeprefix(PREFIX)
        if not request.path.startswith(PREFIX) or name not in fleet_api.CALLS:
            raise RejectedError(404, "not for nodes")
        if request.method != "POST":
            raise RejectedError(405, "only POST")
        try:
            key = verify_signature(request.headers)
        except NotSignedError as error:
            raise RejectedError(401, str(error)) from error
        self.listener.note_progress(request.connection)
        owner = hashlib.sha256(key).hexdigest()
        session = self._known.get(owner)
        if session is not None:
            self.listener.assign_owner(request.connection, owner)
            limiter = self._object_calls if name in _OBJECT_CALLS else self._calls
            await limiter.wait_turn(owner)
            self._check_size(name, request, session)
        elif request.size > self.limits.unknown_body_bytes:
            raise RejectedError(413, "a large call of a key that is not known yet")
        else:
            await self._introductions.wait_turn(request.connection.address)
            new = NodeSession("", self._unknown_calls, self.limits)
            session = self._unknown.setdefault(owner, new)
        session.num_requests += 1
        try:
            return await self._handle(name, request, session, owner)
        finally:
            session.num_requests -= 1
            if not session.num_requests:
                self._unknown.pop(owner, None)

    def _check_size(self, name: str, request: Request, session: NodeSession) -> None:
        """Refuse a long call that brings no object, before it is read.

        Two bytes stand for an empty message, which takes fifty in memory: megabytes of
        them would take hundreds, and the gate for seconds.
        """
        max_size = self.limits.unknown_body_bytes
        if (
            name != "push-object"
            and request.size > max_size + session.staging.max_head_bytes()
        ):
            raise RejectedError(413, "a long call that brings no object")

    async def _handle(
        self, name: str, request: Request, session: NodeSession, owner: str
    ) -> Response:
        held = self._bodies.hold(session.owner, request.size)
        await request.resources.enter_async_context(held)
        body = await request.read_body()
        is_large = request.size > self.limits.unknown_body_bytes
        async with self._large if is_large else nullcontext():
            message = _parse(name, body.read())
            node_id = fleet_api.claimed_node_id(message)
            if None not in (node_id, session.node_id) and node_id != session.node_id:
                raise RejectedError(400, "a call in the name of another node")
            handler = RequestHandler(
                self.backend, session, request, self.listener.is_only_connection
            )
            response = await handler.handle(name, message)
        if response.status < 400:
            if node_id is None:  # an activation: the response says who it is
                content = response.read_body()
                node_id = fleet_pb2.ActivateNodeResponse.FromString(content).node_id
            session.node_id = node_id
            if owner not in self._known:
                self._remember(owner, session)
            self.listener.assign_owner(request.connection, owner)
        return response

    def _remember(self, owner: str, session: NodeSession) -> None:
        """Remember a key that the SuperLink has accepted."""
        LOG.log(
            INFO, "Node %s has come in, with key %s...", session.node_id, owner[:12]
        )
        session.owner, session.calls = owner, asyncio.Semaphore(self.limits.node_calls)
        self._known[owner] = session
        while len(self._known) > _MAX_KEYS:
            self._known.popitem(last=False)


def _parse(name: str, body: bytes) -> Message:
    try:
        return fleet_api.parse_request(name, body)
    except ValueError as error:
        raise RejectedError(400, str(error)) from error
