"""HTTP/1.1 over asyncio, read and written with h11, never more bytes than allowed.

Bodies on their way to or from somebody slow are spooled to a file without a name.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

import h11

READ_BYTES = 64 * 2**10
# What is still read from a client that was refused, so that it hears why.
_DRAIN_BYTES, _DRAIN_SECONDS = 4 * READ_BYTES, 1.0
# Larger bodies are spooled to a file.
_MAX_IN_MEMORY = 256 * 2**10


class RejectedError(Exception):
    """Reject a request: it is answered with this status and reason only."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class SpooledBody:
    """A body: in memory if it is small, else in a file without a name."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(_MAX_IN_MEMORY)  # noqa: SIM115
        self.size = 0

    def append(self, data: bytes | bytearray) -> int:
        """Append bytes; return where they begin."""
        start = self._file.seek(0, 2)
        self._file.write(data)
        self.size += len(data)
        return start

    def read(self, start: int = 0, size: int = -1) -> bytes:
        """Return the bytes, or some of them."""
        self._file.seek(start)
        return self._file.read(size)

    def close(self) -> None:
        """Free the bytes."""
        self._file.close()


@dataclass(frozen=True)
class Response:
    """A status, a body and a few headers."""

    status: int
    body: bytes | SpooledBody = b""
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def size(self) -> int:
        """Bytes of the body."""
        return len(self.body) if isinstance(self.body, bytes) else self.body.size

    def read_body(self, start: int = 0, size: int | None = None) -> bytes:
        """Return the body, or some of it."""
        if isinstance(self.body, bytes):
            return (
                self.body[start:] if size is None else self.body[start : start + size]
            )
        return self.body.read(start, -1 if size is None else size)

    def chunks(self) -> Iterator[bytes]:
        """Yield the body, a few bytes at a time."""
        for start in range(0, self.size, READ_BYTES):
            yield self.read_body(start, READ_BYTES)


@dataclass(eq=False)
class ClientConnection:
    """A connection to the gate.

    Attributes
    ----------
    owner : str, optional
        The node it belongs to, once that is known.
    has_tls : bool
        Whether the TLS handshake is over.
    """

    address: str
    socket: socket.socket
    task: asyncio.Task[None] | None = None
    owner: str | None = None
    requests: int = 0
    has_tls: bool = False


@dataclass(eq=False)
class Request:
    """A request whose body has not been read yet.

    Attributes
    ----------
    read_body : async callable
        Reads the body.
    has_hung_up : callable
        Returns True if the client has closed the connection.
    resources : AsyncExitStack
        What is freed once the request is answered.
    """

    method: str
    path: str
    headers: dict[str, str]
    size: int
    connection: ClientConnection
    read_body: Callable[[], Awaitable[SpooledBody]]
    has_hung_up: Callable[[], bool]
    resources: AsyncExitStack


async def wait_readable(waiting: socket.socket) -> None:
    """Wait for a byte or a connection, which costs a socket and nothing more."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(waiting, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(waiting)


async def next_event(
    http: h11.Connection, reader: asyncio.StreamReader
) -> h11.Event | type[h11.PAUSED]:
    """Return the next event on a connection."""
    while True:
        event = http.next_event()
        if event is not h11.NEED_DATA:
            return event  # type: ignore[return-value]  # h11's sentinels are types
        http.receive_data(await reader.read(READ_BYTES))


async def read_body(
    http: h11.Connection, reader: asyncio.StreamReader, body: SpooledBody
) -> SpooledBody:
    """Read the body of the request whose head has been read."""
    while True:
        event = await next_event(http, reader)
        if isinstance(event, h11.Data):
            body.append(event.data)
        elif isinstance(event, h11.EndOfMessage):
            return body
        else:
            raise EOFError


async def send_response(
    http: h11.Connection,
    writer: asyncio.StreamWriter,
    response: Response,
    seconds: float,
    is_last: bool,
) -> None:
    """Send a response, if it still can be sent, within so many seconds.

    If it is the last, or the request was not read to its end, the client is told that
    the connection will be closed.
    """
    if http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        return
    headers = [*response.headers, ("content-length", str(response.size))]
    if is_last or http.their_state is not h11.DONE:
        headers.append(("connection", "close"))
    async with asyncio.timeout(seconds):
        head = h11.Response(status_code=response.status, headers=headers)
        writer.write(http.send(head) or b"")
        for chunk in response.chunks():
            writer.write(http.send(h11.Data(data=chunk)) or b"")
            await writer.drain()
        writer.write(http.send(h11.EndOfMessage()) or b"")
        await writer.drain()


async def drain(reader: asyncio.StreamReader) -> None:
    """Read a little of what is on its way, or a response would be lost with it."""
    left = _DRAIN_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            while left > 0 and (data := await reader.read(READ_BYTES)):
                left -= len(data)
