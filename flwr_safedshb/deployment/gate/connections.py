"""Connections to the gate: who may hold one, for how long, and with how many bytes.

A connection is unknown until a call over it has been accepted by the SuperLink. Unknown
ones are few, overall and by address. For a new one, the address that has the most gives
up the one that has not come further for the longest time: whoever holds connections
open closes their own. HTTP itself is read by h11.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import h11

from flwr_safedshb.deployment.gate.limits import Limits
from flwr_safedshb.deployment.gate.wire import (
    READ_BYTES,
    Answer,
    error_status,
    linger,
    next_event,
    read_body,
    readable,
    send,
)

# Connections that end before what they leave behind is collected.
_COLLECTED = 64


@dataclass(eq=False)
class Call:
    """A request whose body has not been read yet."""

    method: str
    path: str
    headers: dict[str, str]
    size: int
    connection: Connection
    body: Callable[[], Awaitable[bytes]]
    gone: Callable[[], bool]


class RefusedError(Exception):
    """A request that is answered with a status and nothing else; then it ends."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(eq=False)
class Connection:
    """One connection; `owner` is the node it belongs to once that is known."""

    address: str
    socket: socket.socket
    task: asyncio.Task[None] | None = None
    owner: str | None = None
    calls: int = field(default=0)


Handler = Callable[[Call], Awaitable[Answer]]


class Door:
    """Accepts connections within the limits and hands their calls to a handler."""

    def __init__(self, handler: Handler, limits: Limits, tls: ssl.SSLContext) -> None:
        self._handler, self._limits, self._tls = handler, limits, tls
        # Those that have not come further for the longest time first.
        self._unknown: dict[Connection, None] = {}
        self._owned: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self._ended = 0

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        try:
            while True:
                try:
                    accepted, address = await loop.sock_accept(listener)
                except OSError:  # out of files: those that time out give them back
                    await asyncio.sleep(0.1)
                    continue
                self._begin(accepted, str(address[0]))
        finally:
            for connection in [*self._unknown]:
                self._close(connection)
                if connection.task is not None:
                    connection.task.cancel()

    def _begin(self, accepted: socket.socket, address: str) -> None:
        held = Counter(connection.address for connection in self._unknown)
        if held[address] >= self._limits.unknown_by_address:
            self._close_stalest(address)
        elif held.total() >= self._limits.unknown_connections:
            ((most, _),) = held.most_common(1)
            self._close_stalest(most)
        connection = Connection(address, accepted)
        self._unknown[connection] = None
        connection.task = asyncio.create_task(self._run(connection, accepted))

    def _close_stalest(self, address: str) -> None:
        self._close(next(c for c in self._unknown if c.address == address))

    def advanced(self, connection: Connection) -> None:
        """Note that a connection has come further: others are closed before it."""
        if connection in self._unknown:
            del self._unknown[connection]
            self._unknown[connection] = None

    def _close(self, connection: Connection) -> None:
        self._unknown.pop(connection, None)
        self.refusals["connections closed for newer ones"] += 1
        # Hung up on and not cancelled: in the midst of a handshake asyncio would go on
        # with the number of a file that is another connection's by then.
        with suppress(OSError):
            connection.socket.shutdown(socket.SHUT_RDWR)

    def belongs(self, connection: Connection, owner: str) -> None:
        """Say which node a connection is of; a node has a limited number of them."""
        if connection.owner is not None:
            return
        if self._owned[owner] >= self._limits.node_connections:
            raise RefusedError(503, "too many connections of one node")
        connection.owner = owner
        self._owned[owner] += 1
        self._unknown.pop(connection, None)

    async def _run(self, connection: Connection, accepted: socket.socket) -> None:
        writer: asyncio.StreamWriter | None = None
        try:
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(self._limits.handshake_seconds):
                await readable(accepted)
            self.advanced(connection)
            reader = asyncio.StreamReader(limit=READ_BYTES)
            protocol = asyncio.StreamReaderProtocol(reader)
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=self._limits.handshake_seconds,
                ssl_shutdown_timeout=1.0,
            )
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            self.advanced(connection)
            await self._talk(connection, reader, writer)
        except (OSError, EOFError, ssl.SSLError, TimeoutError, h11.ProtocolError):
            self.refusals["connections that broke off"] += 1
        finally:
            self._unknown.pop(connection, None)
            self._ended += 1
            if self._ended % _COLLECTED == 0:
                # What TLS keeps for a connection is not seen by the collector, which
                # would let hundreds of them wait.
                gc.collect()
            if connection.owner is not None:
                self._owned[connection.owner] -= 1
            if writer is not None:
                writer.transport.abort()
            else:
                with suppress(OSError):
                    accepted.close()

    async def _talk(
        self,
        connection: Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        size = self._limits.header_bytes
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=size)
        while True:
            idle = connection.owner is not None and connection.calls > 0
            seconds = self._limits.idle_seconds if idle else 0.0
            try:
                async with asyncio.timeout(seconds + self._limits.header_seconds):
                    request = await next_event(http, reader)
                if not isinstance(request, h11.Request):
                    return
                call = self._call(connection, http, reader, request)
                answer = await self._handler(call)
                connection.calls += 1
            except (RefusedError, h11.RemoteProtocolError) as error:
                answer = self._refused(error)
            except TimeoutError:
                answer = Answer(408)
                self.refusals["requests that took too long"] += 1
            await send(http, writer, answer)
            if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
                await linger(reader)
                return
            http.start_next_cycle()

    def _refused(self, error: RefusedError | h11.RemoteProtocolError) -> Answer:
        reason = str(error) if isinstance(error, RefusedError) else "not HTTP"
        self.refusals[reason] += 1
        return Answer(getattr(error, "status", error_status(error)), reason.encode())

    def _call(
        self,
        connection: Connection,
        http: h11.Connection,
        reader: asyncio.StreamReader,
        request: h11.Request,
    ) -> Call:
        if len(request.headers) > self._limits.headers:
            raise RefusedError(431, "too many headers")
        headers: dict[str, str] = {}
        for name, value in request.headers:
            key = name.decode("ascii")
            if key in headers:
                raise RefusedError(400, "a header that comes twice")
            headers[key] = value.decode("latin-1")
            if not (value.isascii() and headers[key].isprintable()):
                raise RefusedError(400, "a header that is no plain text")
        # Chunks would have to be counted as they come; Flower says the length.
        length = headers.get("content-length", "")
        if "transfer-encoding" in headers or not length.isdecimal():
            raise RefusedError(411, "a request without its length")
        size = int(length)
        if size > self._limits.body_bytes:
            raise RefusedError(413, f"more than {self._limits.body_bytes} bytes")

        async def body() -> bytes:
            allowed = self._limits.body_seconds
            allowed += size / self._limits.body_bytes_per_second
            async with asyncio.timeout(allowed):
                return await read_body(http, reader)

        target = request.target.decode("latin-1")
        return Call(
            request.method.decode("ascii"),
            target,
            headers,
            size,
            connection,
            body,
            reader.at_eof,
        )
