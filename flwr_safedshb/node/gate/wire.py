"""Bytes of HTTP on their way: read and written with h11, and never too many.

What is on its way to or from somebody slow waits in a file that has no name: memory is
for what is being looked at.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import h11

READ_BYTES = 64 * 2**10
# What is still taken from whoever was refused, so that they hear why.
_LINGER_BYTES, _LINGER_SECONDS = 4 * READ_BYTES, 1.0
# Up to here bytes wait in memory.
_MAX_IN_MEMORY = 256 * 2**10


class Spool:
    """Bytes that wait: few in memory, more in a file without a name."""

    def __init__(self, content: bytes = b"") -> None:
        self._file = tempfile.SpooledTemporaryFile(_MAX_IN_MEMORY)  # noqa: SIM115
        self.size = 0
        if content:
            self.add(content)

    def add(self, data: bytes | bytearray) -> int:
        """Put bytes after those that are there; return where they begin."""
        start = self._file.seek(0, 2)
        self._file.write(data)
        self.size += len(data)
        return start

    def content(self, start: int = 0, size: int = -1) -> bytes:
        """Return the bytes, or some of them."""
        self._file.seek(start)
        return self._file.read(size)

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes, a few at a time."""
        for start in range(0, self.size, READ_BYTES):
            yield self.content(start, READ_BYTES)

    def close(self) -> None:
        """Let go of the bytes."""
        self._file.close()


@dataclass(frozen=True)
class Answer:
    """What goes back: a status, a few headers, a body."""

    status: int
    body: bytes | Spool = b""
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def size(self) -> int:
        """Of the body, in bytes."""
        return self.body.size if isinstance(self.body, Spool) else len(self.body)

    def content(self) -> bytes:
        """Return the whole body."""
        return self.body.content() if isinstance(self.body, Spool) else self.body

    def pieces(self) -> Iterator[bytes]:
        """Yield the body, a few bytes at a time."""
        if isinstance(self.body, Spool):
            yield from self.body.pieces()
        else:
            for start in range(0, len(self.body), READ_BYTES):
                yield self.body[start : start + READ_BYTES]


async def readable(waiting: socket.socket) -> None:
    """Wait for a byte, or a connection: until then it costs a socket and no more."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(waiting, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(waiting)


def error_status(error: Exception) -> int:
    """Return the status that h11 suggests for what it could not read."""
    return int(getattr(error, "error_status_hint", 400))


async def next_event(
    http: h11.Connection, reader: asyncio.StreamReader
) -> h11.Event | type[h11.PAUSED]:
    """Return what comes next on a connection."""
    while True:
        event = http.next_event()
        if event is not h11.NEED_DATA:
            return event  # type: ignore[return-value]  # h11's sentinels are types
        http.receive_data(await reader.read(READ_BYTES))


async def read_body(
    http: h11.Connection, reader: asyncio.StreamReader, body: Spool
) -> Spool:
    """Read the body of the request whose head has been read."""
    while True:
        event = await next_event(http, reader)
        if isinstance(event, h11.Data):
            body.add(event.data)
        elif isinstance(event, h11.EndOfMessage):
            return body
        else:
            raise EOFError


async def send(
    http: h11.Connection,
    writer: asyncio.StreamWriter,
    answer: Answer,
    seconds: float,
    last: bool,
) -> None:
    """Answer the request, if it still can be, within so many seconds.

    If it is the last, or was not read to its end, the connection is to be closed.
    """
    if http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        return
    headers = [*answer.headers, ("content-length", str(answer.size))]
    if last or http.their_state is not h11.DONE:
        headers.append(("connection", "close"))
    async with asyncio.timeout(seconds):
        response = h11.Response(status_code=answer.status, headers=headers)
        writer.write(http.send(response) or b"")
        for piece in answer.pieces():
            writer.write(http.send(h11.Data(data=piece)) or b"")
            await writer.drain()
        writer.write(http.send(h11.EndOfMessage()) or b"")
        await writer.drain()


async def linger(reader: asyncio.StreamReader) -> None:
    """Read a little of what is on its way, or an answer would be lost with it."""
    left = _LINGER_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_SECONDS):
            while left > 0 and (data := await reader.read(READ_BYTES)):
                left -= len(data)
