"""Connections to the gate: who may hold one, for how long, and with how many bytes.

A connection is unknown until a call over it has been accepted by the SuperLink. Unknown
connections are few, overall and by address, and their rate is limited. For a new one,
the address that has the most gives up the one that made no progress for the longest
time: whoever holds connections open closes their own. HTTP itself is read by h11.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import struct
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress

import h11

from flwr_safedshb.node.gate import http
from flwr_safedshb.node.gate.http import (
    ClientConnection,
    RejectedError,
    Request,
    Response,
    SpooledBody,
)
from flwr_safedshb.node.gate.limits import Limits, RateLimiter, group_address

# Connections that end before their garbage is collected.
_COLLECT_EVERY = 64
# Connections that are accepted before other tasks have their turn.
_MAX_ACCEPTS = 16
# Addresses that are remembered to have nodes.
_MAX_NODE_ADDRESSES = 4096
# Values of SO_LINGER: close with a reset, or orderly.
_RESET, _ORDERLY = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)

Handler = Callable[[Request], Awaitable[Response]]


class Listener:
    """Accept connections within the limits and hand their requests to a handler."""

    def __init__(self, handler: Handler, limits: Limits, tls: ssl.SSLContext) -> None:
        self._handler, self._limits, self._tls = handler, limits, tls
        # Those that made no progress for the longest time first.
        self._unknown: dict[ClientConnection, None] = {}
        self._owned: dict[str, dict[ClientConnection, None]] = {}
        self._node_addresses: OrderedDict[str, None] = OrderedDict()
        self._arrivals = RateLimiter(limits.arrivals)
        self._address_arrivals = RateLimiter(limits.address_arrivals)
        self.refusals: Counter[str] = Counter()
        self._num_ended = 0

    async def serve(self, server: socket.socket) -> None:
        """Accept connections until cancelled."""
        server.setblocking(False)
        try:
            while True:
                await http.wait_readable(server)
                try:
                    for _ in range(_MAX_ACCEPTS):
                        accepted, address = server.accept()
                        self._accept_connection(
                            accepted, group_address(str(address[0]))
                        )
                except BlockingIOError:
                    pass
                except OSError:  # out of files: those that time out give them back
                    await asyncio.sleep(0.1)
                await asyncio.sleep(0)
        finally:
            owned = [c for mine in self._owned.values() for c in mine]
            for connection in [*self._unknown, *owned]:
                self._close(connection)
                if connection.task is not None:
                    connection.task.cancel()

    def _accept_connection(self, accepted: socket.socket, address: str) -> None:
        """Serve a connection, or reset it if it came too fast."""
        # Flower takes a connection that ends in its handshake for a permanent error and
        # drops what it was about to send; one that is reset it makes again.
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        # Nodes that come back are not kept waiting by strangers elsewhere.
        has_node = address in self._node_addresses
        admitted = self._address_arrivals.admit(address)
        if not (admitted and (has_node or self._arrivals.admit(""))):
            self.refusals["connections that came too fast"] += 1
            accepted.close()
            return
        held = Counter(connection.address for connection in self._unknown)
        if held[address] >= self._limits.unknown_by_address:
            self._close_stalest(address)
        elif held.total() >= self._limits.unknown_connections:
            ((most, _),) = held.most_common(1)
            self._close_stalest(most)
        accepted.setblocking(False)
        # asyncio does so only for sockets that name their protocol, and this one does
        # not; the end of a response would wait until its beginning is acknowledged.
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = ClientConnection(address, accepted)
        self._unknown[connection] = None
        connection.task = asyncio.create_task(self._run(connection))

    def _close_stalest(self, address: str) -> None:
        self._close(next(c for c in self._unknown if c.address == address))

    def note_progress(self, connection: ClientConnection) -> None:
        """Note that a connection made progress: others are closed before it."""
        if connection in self._unknown:
            del self._unknown[connection]
            self._unknown[connection] = None

    def _close(self, connection: ClientConnection) -> None:
        self._remove(connection)
        self.refusals["connections closed for newer ones"] += 1
        # Shut down, not cancelled: in the midst of a handshake asyncio would go on with
        # a file descriptor that belongs to another connection by then.
        how = socket.SHUT_RDWR if connection.has_tls else socket.SHUT_RD
        with suppress(OSError):
            connection.socket.shutdown(how)

    def _remove(self, connection: ClientConnection) -> None:
        self._unknown.pop(connection, None)
        if connection.owner is not None:
            mine = self._owned.get(connection.owner, {})
            mine.pop(connection, None)
            if not mine:
                self._owned.pop(connection.owner, None)

    def assign_owner(self, connection: ClientConnection, owner: str) -> None:
        """Assign a connection to its node; for one too many the oldest is closed."""
        self._node_addresses[connection.address] = None
        self._node_addresses.move_to_end(connection.address)
        if len(self._node_addresses) > _MAX_NODE_ADDRESSES:
            self._node_addresses.popitem(last=False)
        if connection.owner not in (None, owner):
            raise RejectedError(400, "a connection that two nodes share")
        mine = self._owned.setdefault(owner, {})
        if connection.owner is None and len(mine) >= self._limits.node_connections:
            self._close(next(iter(mine)))
            mine = self._owned.setdefault(owner, mine)
        connection.owner = owner
        self._unknown.pop(connection, None)
        mine.pop(connection, None)
        mine[connection] = None  # the last to be closed

    def is_only_connection(self, connection: ClientConnection) -> bool:
        """Return True if the node of a connection has no other."""
        return {*self._owned.get(connection.owner or "", ())} <= {connection}

    async def _run(self, connection: ClientConnection) -> None:
        """Shake hands and serve requests until either side closes the connection."""
        accepted = connection.socket
        writer: asyncio.StreamWriter | None = None
        try:
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(self._limits.handshake_seconds):
                await http.wait_readable(accepted)
            self.note_progress(connection)
            reader = asyncio.StreamReader(limit=http.READ_BYTES)
            protocol = asyncio.StreamReaderProtocol(reader)
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=self._limits.handshake_seconds,
                ssl_shutdown_timeout=1.0,
            )
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ORDERLY)
            connection.has_tls = True
            self.note_progress(connection)
            await self._serve_requests(connection, reader, writer)
        except (OSError, EOFError, ssl.SSLError, TimeoutError, h11.ProtocolError):
            self.refusals["connections that broke off"] += 1
        finally:
            self._remove(connection)
            self._num_ended += 1
            if self._num_ended % _COLLECT_EVERY == 0:
                # The collector does not see how much TLS keeps for each connection, and
                # would let hundreds of them wait.
                gc.collect()
            if writer is not None:
                writer.transport.abort()
            else:
                with suppress(OSError):
                    accepted.close()

    async def _serve_requests(
        self,
        connection: ClientConnection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        state = h11.Connection(
            h11.SERVER, max_incomplete_event_size=self._limits.header_bytes
        )
        while True:
            async with AsyncExitStack() as resources:
                response = await self._handle_next(connection, state, reader, resources)
                if response is None:
                    return
                # Whom the SuperLink did not accept must pass the rate limit again.
                is_last = connection.owner is None
                seconds = self._max_seconds(response.size)
                await http.send_response(state, writer, response, seconds, is_last)
            if state.our_state is not h11.DONE or state.their_state is not h11.DONE:
                await http.drain(reader)
                return
            state.start_next_cycle()

    async def _handle_next(
        self,
        connection: ClientConnection,
        state: h11.Connection,
        reader: asyncio.StreamReader,
        resources: AsyncExitStack,
    ) -> Response | None:
        """Return the response to the next request; None if there is none."""
        may_idle = connection.owner is not None and connection.requests > 0
        seconds = self._limits.idle_seconds if may_idle else 0.0
        try:
            async with asyncio.timeout(seconds + self._limits.header_seconds):
                head = await http.next_event(state, reader)
            if not isinstance(head, h11.Request):
                return None
            request = self._make_request(connection, state, reader, head, resources)
            response = await self._handler(request)
            connection.requests += 1
        except RejectedError as error:
            return self._count_refusal(error.status, str(error))
        except h11.RemoteProtocolError as error:
            return self._count_refusal(int(error.error_status_hint), "not HTTP")
        except TimeoutError:
            return self._count_refusal(408, "requests that took too long")
        except (OSError, EOFError):
            raise
        except Exception as error:  # whatever it is, it ends this request and no other
            return self._count_refusal(500, f"{type(error).__name__} within the gate")
        return response

    def _count_refusal(self, status: int, reason: str) -> Response:
        self.refusals[reason] += 1
        return Response(status, reason.encode())

    def _max_seconds(self, size: int) -> float:
        """Return how long so many bytes may take, in or out."""
        return self._limits.body_seconds + size / self._limits.body_bytes_per_second

    def _make_request(
        self,
        connection: ClientConnection,
        state: h11.Connection,
        reader: asyncio.StreamReader,
        head: h11.Request,
        resources: AsyncExitStack,
    ) -> Request:
        headers = self._check_headers(head)
        # Chunks would have to be counted as they come; Flower states the length.
        length = headers.get("content-length", "")
        if "transfer-encoding" in headers or not length.isdecimal():
            raise RejectedError(411, "a request without its length")
        size = int(length)
        if size > self._limits.body_bytes:
            raise RejectedError(413, f"more than {self._limits.body_bytes} bytes")

        async def read_body() -> SpooledBody:
            body = SpooledBody()
            resources.callback(body.close)
            async with asyncio.timeout(self._max_seconds(size)):
                return await http.read_body(state, reader, body)

        return Request(
            head.method.decode("ascii"),
            head.target.decode("latin-1"),
            headers,
            size,
            connection,
            read_body,
            reader.at_eof,
            resources,
        )

    def _check_headers(self, head: h11.Request) -> dict[str, str]:
        if len(head.headers) > self._limits.headers:
            raise RejectedError(431, "too many headers")
        headers: dict[str, str] = {}
        for name, value in head.headers:
            key = name.decode("ascii")
            if key in headers:
                raise RejectedError(400, "a header that comes twice")
            headers[key] = value.decode("latin-1")
            if not (value.isascii() and headers[key].isprintable()):
                raise RejectedError(400, "a header that is not plain text")
        return headers
