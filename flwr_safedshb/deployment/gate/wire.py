"""Bytes of HTTP on their way: read and written with h11, and never too many."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from dataclasses import dataclass

import h11

READ_BYTES = 64 * 2**10
# What is still taken from whoever was refused, so that they hear why.
_LINGER_BYTES, _LINGER_SECONDS = 4 * READ_BYTES, 1.0


@dataclass(frozen=True)
class Answer:
    """What goes back: a status, a few headers, a body."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


async def readable(accepted: socket.socket) -> None:
    """Wait for the first byte: until then a connection costs a socket and no more."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(accepted, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(accepted)


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


async def read_body(http: h11.Connection, reader: asyncio.StreamReader) -> bytes:
    """Return the body of the request whose head has been read."""
    body = bytearray()
    while True:
        event = await next_event(http, reader)
        if isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return bytes(body)
        else:
            raise EOFError


async def send(
    http: h11.Connection, writer: asyncio.StreamWriter, answer: Answer
) -> None:
    """Answer the request, if it still can be."""
    if http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        return
    headers = [*answer.headers, ("content-length", str(len(answer.body)))]
    if http.their_state is not h11.DONE:
        headers.append(("connection", "close"))
    response = h11.Response(status_code=answer.status, headers=headers)
    for event in (response, h11.Data(data=answer.body), h11.EndOfMessage()):
        data = http.send(event)
        if data:
            writer.write(data)
    async with asyncio.timeout(60.0):
        await writer.drain()


async def linger(reader: asyncio.StreamReader) -> None:
    """Read a little of what is on its way, or an answer would be lost with it."""
    left = _LINGER_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_SECONDS):
            while left > 0 and (data := await reader.read(READ_BYTES)):
                left -= len(data)
