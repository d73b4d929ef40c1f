"""Connections to the gate: who may hold one, for how long, and with how many bytes.

A connection is unknown until a call over it has been accepted by the SuperLink. Unknown
ones are few, overall and by address, and come at a pace. For a new one, the address
that has the most gives up the one that has not come further for the longest time:
whoever holds connections open closes their own. HTTP itself is read by h11.
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

from flwr_safedshb.node.gate.call import Call, Connection, RefusedError
from flwr_safedshb.node.gate.limits import Limits, Pace, place
from flwr_safedshb.node.gate.wire import (
    READ_BYTES,
    Answer,
    Spool,
    error_status,
    linger,
    next_event,
    read_body,
    readable,
    send,
)

# Connections that end before what they leave behind is collected.
_COLLECTED = 64
# Connections that are accepted before others have their turn.
_AT_ONCE = 16
# Addresses that are known for their nodes.
_MAX_HOMES = 4096
# How a connection ends that is closed.
_RESET, _ORDERLY = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)

Handler = Callable[[Call], Awaitable[Answer]]


class Door:
    """Accepts connections within the limits and hands their calls to a handler."""

    def __init__(self, handler: Handler, limits: Limits, tls: ssl.SSLContext) -> None:
        self._handler, self._limits, self._tls = handler, limits, tls
        # Those that have not come further for the longest time first.
        self._unknown: dict[Connection, None] = {}
        self._owned: dict[str, dict[Connection, None]] = {}
        self._homes: OrderedDict[str, None] = OrderedDict()
        self._arrivals = Pace(limits.arrivals)
        self._by_address = Pace(limits.address_arrivals)
        self.refusals: Counter[str] = Counter()
        self._ended = 0

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections until cancelled."""
        listener.setblocking(False)
        try:
            while True:
                await readable(listener)
                try:
                    for _ in range(_AT_ONCE):
                        accepted, address = listener.accept()
                        self._begin(accepted, place(str(address[0])))
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

    def _begin(self, accepted: socket.socket, address: str) -> None:
        # Flower takes one that ends in a handshake for an error that does not pass, and
        # gives up what it was about to send; one that is reset it makes again.
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        # Nodes that come back are not kept waiting by strangers elsewhere.
        at_home = address in self._homes
        admitted = self._by_address.admits(address)
        if not (admitted and (at_home or self._arrivals.admits(""))):
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
        # asyncio does so only where a socket names its protocol; this one does not, and
        # the end of an answer would wait for the other side to confirm its beginning.
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
        self._forget(connection)
        self.refusals["connections closed for newer ones"] += 1
        # Hung up on and not cancelled: in the midst of a handshake asyncio would go on
        # with the number of a file that is another connection's by then.
        how = socket.SHUT_RDWR if connection.shaken else socket.SHUT_RD
        with suppress(OSError):
            connection.socket.shutdown(how)

    def _forget(self, connection: Connection) -> None:
        self._unknown.pop(connection, None)
        if connection.owner is not None:
            mine = self._owned.get(connection.owner, {})
            mine.pop(connection, None)
            if not mine:
                self._owned.pop(connection.owner, None)

    def belongs(self, connection: Connection, owner: str) -> None:
        """Say which node a connection is of; for one too many its oldest is closed."""
        self._homes[connection.address] = None
        self._homes.move_to_end(connection.address)
        if len(self._homes) > _MAX_HOMES:
            self._homes.popitem(last=False)
        if connection.owner not in (None, owner):
            raise RefusedError(400, "a connection that two nodes share")
        mine = self._owned.setdefault(owner, {})
        if connection.owner is None and len(mine) >= self._limits.node_connections:
            self._close(next(iter(mine)))
            mine = self._owned.setdefault(owner, mine)
        connection.owner = owner
        self._unknown.pop(connection, None)
        mine.pop(connection, None)
        mine[connection] = None  # the last to be closed

    def is_alone(self, connection: Connection) -> bool:
        """Say whether a node has no other connection."""
        return {*self._owned.get(connection.owner or "", ())} <= {connection}

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
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ORDERLY)
            connection.shaken = True
            self.advanced(connection)
            await self._talk(connection, reader, writer)
        except (OSError, EOFError, ssl.SSLError, TimeoutError, h11.ProtocolError):
            self.refusals["connections that broke off"] += 1
        finally:
            self._forget(connection)
            self._ended += 1
            if self._ended % _COLLECTED == 0:
                # What TLS keeps for a connection is not seen by the collector, which
                # would let hundreds of them wait.
                gc.collect()
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
            async with AsyncExitStack() as held:
                answer = await self._answered(connection, http, reader, held)
                if answer is None:
                    return
                # Whom the SuperLink did not let in has to come at its pace again.
                last = connection.owner is None
                await send(http, writer, answer, self._seconds(answer.size), last)
            if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
                await linger(reader)
                return
            http.start_next_cycle()

    async def _answered(
        self,
        connection: Connection,
        http: h11.Connection,
        reader: asyncio.StreamReader,
        held: AsyncExitStack,
    ) -> Answer | None:
        """Return what the next request is answered with, None if there is none."""
        idle = connection.owner is not None and connection.calls > 0
        seconds = self._limits.idle_seconds if idle else 0.0
        try:
            async with asyncio.timeout(seconds + self._limits.header_seconds):
                request = await next_event(http, reader)
            if not isinstance(request, h11.Request):
                return None
            call = self._call(connection, http, reader, request, held)
            answer = await self._handler(call)
            connection.calls += 1
        except RefusedError as error:
            return self._refused(error.status, str(error))
        except h11.RemoteProtocolError as error:
            return self._refused(error_status(error), "not HTTP")
        except TimeoutError:
            return self._refused(408, "requests that took too long")
        except (OSError, EOFError):
            raise
        except Exception as error:  # whatever it is, it ends this call and no other
            return self._refused(500, f"{type(error).__name__} within the gate")
        return answer

    def _refused(self, status: int, reason: str) -> Answer:
        self.refusals[reason] += 1
        return Answer(status, reason.encode())

    def _seconds(self, size: int) -> float:
        """Return how long so many bytes may take, in or out."""
        return self._limits.body_seconds + size / self._limits.body_bytes_per_second

    def _call(
        self,
        connection: Connection,
        http: h11.Connection,
        reader: asyncio.StreamReader,
        request: h11.Request,
        held: AsyncExitStack,
    ) -> Call:
        headers = self._headers(request)
        # Chunks would have to be counted as they come; Flower says the length.
        length = headers.get("content-length", "")
        if "transfer-encoding" in headers or not length.isdecimal():
            raise RefusedError(411, "a request without its length")
        size = int(length)
        if size > self._limits.body_bytes:
            raise RefusedError(413, f"more than {self._limits.body_bytes} bytes")

        async def body() -> Spool:
            spool = Spool()
            held.callback(spool.close)
            async with asyncio.timeout(self._seconds(size)):
                return await read_body(http, reader, spool)

        method, target = (
            request.method.decode("ascii"),
            request.target.decode("latin-1"),
        )
        gone = reader.at_eof
        return Call(method, target, headers, size, connection, body, gone, held)

    def _headers(self, request: h11.Request) -> dict[str, str]:
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
        return headers
