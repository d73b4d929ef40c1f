"""The gate: what nodes reach of a SuperLink, behind a reverse proxy.

A SuperLink serves three APIs on one port: Fleet for nodes, who sign every call, Control
for its operators, and Runtime for its own processes. In the free edition nobody has to
prove anything to the last two: who reaches the port can register nodes of their own and
submit runs. So the SuperLink listens on the loopback, and nodes come through two
programs. HAProxy, with the kit's configuration, is the one that strangers reach: it
does TLS, paths, methods, sizes, time-outs, and what one address may take. This gate
listens on the loopback as well and does what takes knowledge of Flower:

- Who signed a call is checked before its body is read. Calls of a key that the
  SuperLink has not accepted yet are small and rare.
- A node pulls only what it was given, and answers only what it was asked, in its own
  name, once, and with a complete reply (`staging`). The gate writes what goes inside:
  path, headers and request (`backend`).
- A call for work is held until there is some, so that nodes hear of it at once. A
  message that was given and not confirmed is given again, because the answer that
  brought it was lost with the gate or the proxy (`handlers`).
- Whoever is slow waits alone. Places and rates are counted by node. Nothing that
  others need is held while a client sends or reads: a body is in a file before a place
  for it is taken, and an answer is in a file before it is sent.
- What a node was asked, and its reply so far, are on disk (`journal`), so a gate that
  is started again knows them. What can be looked up at the SuperLink is not kept.

uvicorn serves it: Flower's SuperLink runs on it as well, so it is on every machine that
has Flower, and is one web server to watch for both.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import ssl
from collections import Counter
from contextlib import ExitStack
from logging import INFO, WARNING, getLogger
from pathlib import Path
from weakref import WeakValueDictionary

import httpx
import uvicorn

from flwr_safedshb.node.flower_patches import fleet_api
from flwr_safedshb.node.gate.backend import PREFIX, Backend
from flwr_safedshb.node.gate.handlers import NodeSession, RequestHandler
from flwr_safedshb.node.gate.journal import Journal
from flwr_safedshb.node.gate.limits import Limits, RateLimiter
from flwr_safedshb.node.gate.request import (
    Connection,
    Receive,
    RejectedError,
    Request,
    Response,
    Scope,
    Send,
    send_response,
)
from flwr_safedshb.node.gate.signature import NotSignedError, verify_signature
from flwr_safedshb.node.gate.staging import StagingArea

LOG = getLogger("safedshb.gate")
_OBJECT_CALLS = ("pull-object", "push-object")
_REPORT_SECONDS = 60.0
_HEADER_BYTES = 16 * 2**10
# An idle connection is kept for longer than the proxy keeps it.
_IDLE_SECONDS = 130
# Calls that are under way are waited for when the gate is stopped; nodes try again.
_STOP_SECONDS = 1


def open_listener(host: str, port: int) -> socket.socket:
    """Open a socket for nodes; one that states its protocol.

    asyncio lets answers leave at once only then, and else each takes 40 ms more.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


class Gate:
    """The gate of a SuperLink, an ASGI application.

    Parameters
    ----------
    superlink : str
        Its address, host:port.
    trusted : SSLContext
        Which certificates it may show.
    folder : Path
        For what must be known again after a restart.
    limits : Limits, optional
    certificate : pair of Path, optional
        The certificate and key to show where no proxy does.
    transport : optional
        In place of the network behind the gate, for tests.
    """

    def __init__(
        self,
        superlink: str,
        trusted: ssl.SSLContext,
        folder: Path,
        limits: Limits | None = None,
        certificate: tuple[Path, Path] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.limits = Limits() if limits is None else limits
        for room in (cache := folder / "objects", replies := folder / "replies"):
            room.mkdir(parents=True, exist_ok=True)
        self.backend = Backend(superlink, trusted, self.limits, cache, transport)
        self._journal, self._replies = Journal(folder / "gate.sqlite"), replies
        self._known: dict[str, NodeSession] = {}
        self._unknown: WeakValueDictionary[str, NodeSession] = WeakValueDictionary()
        self._unknown_calls = asyncio.Semaphore(self.limits.node_calls)
        self._introductions = RateLimiter(self.limits.introductions)
        self._calls = RateLimiter(self.limits.calls)
        self._object_calls = RateLimiter(self.limits.object_calls)
        self.refusals: Counter[str] = Counter()
        self.server = uvicorn.Server(
            uvicorn.Config(
                self,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",  # what is refused is counted
                access_log=False,
                proxy_headers=False,  # they would hide which connection it is
                server_header=False,
                date_header=False,
                h11_max_incomplete_event_size=_HEADER_BYTES,
                timeout_keep_alive=_IDLE_SECONDS,
                timeout_graceful_shutdown=_STOP_SECONDS,
                ssl_certfile=certificate and certificate[0],
                ssl_keyfile=certificate and str(certificate[1]),
            )
        )

    async def serve(self, listener: socket.socket) -> None:
        """Answer requests until stopped by a signal, or cancelled."""
        report = asyncio.create_task(self._report_refusals())
        try:
            async with self.backend.client:
                await self.server.serve(sockets=[listener])
        finally:
            report.cancel()
            self._journal.close()

    async def _report_refusals(self) -> None:
        """Log what was refused, once a minute: a line each would fill the disk."""
        while True:
            await asyncio.sleep(_REPORT_SECONDS)
            if self.refusals:
                counts = self.refusals.most_common(10)
                self.refusals.clear()
                reasons = "; ".join(f"{count} x {reason}" for reason, count in counts)
                LOG.log(WARNING, "Refused in the last minute: %s", reasons)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever happens on the way."""
        with ExitStack() as resources:
            try:
                request = Request.from_scope(scope, receive, self.limits, resources)
                session = self._authenticate(request)
            except RejectedError as error:
                await send_response(send, self._refuse(error), self.limits)
                return
            async with session.requests:
                response = await self._respond(request, session)
                if response is not None:
                    await send_response(send, response, self.limits)

    def _authenticate(self, request: Request) -> NodeSession:
        """Return the session of the key that signed a request."""
        name = request.path.removeprefix(PREFIX)
        if not request.path.startswith(PREFIX) or name not in fleet_api.CALLS:
            raise RejectedError(404, "not for nodes")
        if request.method != "POST":
            raise RejectedError(405, "only POST")
        try:
            key = verify_signature(request.headers)
        except NotSignedError as error:
            raise RejectedError(401, str(error)) from error
        session = self._find_session(hashlib.sha256(key).hexdigest())
        most = self.limits.unknown_body_bytes
        if session.node_id is None:
            if request.size > most:
                raise RejectedError(413, "a large call of a key that is not known yet")
            return session
        # Two bytes stand for an empty message, which takes fifty in memory: megabytes
        # of them would take hundreds, and the gate for seconds.
        if name == "push-messages":
            most += session.staging.max_head_bytes()
        if name != "push-object" and request.size > most:
            raise RejectedError(413, "a long call that brings no object")
        session.note_connection(request.connection, self._open_connections())
        return session

    def _find_session(self, owner: str) -> NodeSession:
        session = self._known.get(owner) or self._unknown.get(owner)
        if session is None:
            node_id = self._journal.find_node(owner)
            staging = StagingArea(
                owner,
                self.limits,
                self._journal,
                self._replies / owner,
                self.backend.objects.find_part,
            )
            session = NodeSession(owner, node_id, self.limits, staging)
            (self._unknown if node_id is None else self._known)[owner] = session
        return session

    def _open_connections(self) -> set[Connection]:
        """Return the open connections, one for each of a client with the proxy."""
        clients = (each.client for each in self.server.server_state.connections)
        return {client for client in clients if client is not None}

    async def _respond(self, request: Request, session: NodeSession) -> Response | None:
        """Return the response to a request; None if its client is gone."""
        try:
            return await self.handle_request(request, session)
        except RejectedError as error:
            return self._refuse(error)
        except TimeoutError:
            return self._refuse(RejectedError(408, "requests that took too long"))
        except EOFError:
            self.refusals["connections that broke off"] += 1
            return None
        except Exception as error:  # whatever it is, it ends this request and no other
            reason = f"{type(error).__name__} within the gate"
            return self._refuse(RejectedError(500, reason))

    def _refuse(self, error: RejectedError) -> Response:
        self.refusals[str(error)] += 1
        return Response(error.status, str(error).encode())

    async def handle_request(self, request: Request, session: NodeSession) -> Response:
        """Handle a request that a key has signed, when it is its turn."""
        name = request.path.removeprefix(PREFIX)
        was_known = session.node_id is not None
        if was_known:
            limiter = self._object_calls if name in _OBJECT_CALLS else self._calls
            await limiter.wait_turn(session.owner)
        else:
            await self._introductions.wait_turn(request.address)
        calls = session.calls if was_known else self._unknown_calls
        others = session.find_others(request.connection, self._open_connections())
        handler = RequestHandler(self.backend, session, request, calls, not others)
        response = await handler.handle(name)
        if session.node_id is not None and session.owner not in self._known:
            self._remember(session)
            session.note_connection(request.connection, self._open_connections())
        return response

    def _remember(self, session: NodeSession) -> None:
        """Remember a key that the SuperLink has accepted."""
        assert session.node_id is not None
        LOG.log(
            INFO,
            "Node %s has come in, with key %s...",
            session.node_id,
            session.owner[:12],
        )
        self._known[session.owner] = session
        self._journal.save_node(session.owner, session.node_id)
