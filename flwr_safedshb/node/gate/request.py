"""One call of a node as ASGI hands it over, and the answer to it.

A body on its way in or out lies in a temporary file if it is not small, so whoever is
slow holds a file and a few kilobytes of memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass
from tempfile import SpooledTemporaryFile
from typing import IO, Any

from flwr_safedshb.node.gate.limits import Limits

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# The header in which the proxy states the address of a client.
ADDRESS = "x-forwarded-for"
_CHUNK_BYTES = 64 * 2**10
# Larger bodies are in a file.
_MAX_IN_MEMORY = 256 * 2**10
# A connection between proxy and gate: one of each client's.
Connection = tuple[str, int]


class RejectedError(Exception):
    """Reject a request: it is answered with this status and reason only."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def make_file() -> IO[bytes]:
    """Return a temporary file, which is in memory while it is small."""
    return SpooledTemporaryFile(_MAX_IN_MEMORY)


@dataclass(frozen=True)
class Response:
    """A status, a body and a few headers."""

    status: int
    body: bytes | IO[bytes] = b""
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def size(self) -> int:
        """Bytes of the body."""
        return len(self.body) if isinstance(self.body, bytes) else self.body.seek(0, 2)

    def read_body(self) -> bytes:
        """Return the body."""
        if isinstance(self.body, bytes):
            return self.body
        self.body.seek(0)
        return self.body.read()

    def chunks(self) -> Iterator[bytes]:
        """Yield the body, a few bytes at a time."""
        if isinstance(self.body, bytes):
            yield self.body
            return
        self.body.seek(0)
        while chunk := self.body.read(_CHUNK_BYTES):
            yield chunk


@dataclass(eq=False)
class Request:
    """A request whose body may not have been read yet.

    Attributes
    ----------
    address : str
        Where the client is, as the proxy states it.
    connection : tuple of str and int
    resources : ExitStack
        What is freed once the request is answered.
    """

    method: str
    path: str
    headers: dict[str, str]
    size: int
    address: str
    connection: Connection
    _receive: Receive
    _limits: Limits
    resources: ExitStack
    _end: asyncio.Task[Any] | None = None

    @classmethod
    def from_scope(
        cls, scope: Scope, receive: Receive, limits: Limits, resources: ExitStack
    ) -> Request:
        """Check the head of a request."""
        headers = _check_headers(scope["headers"], limits.headers)
        # Flower states the length; chunks would have to be counted as they come.
        length = headers.get("content-length", "")
        if "transfer-encoding" in headers or not length.isdecimal():
            raise RejectedError(411, "a request without its length")
        if int(length) > limits.body_bytes:
            raise RejectedError(413, f"more than {limits.body_bytes} bytes")
        path = bytes(scope["raw_path"]).decode("latin-1")
        connection = tuple(scope["client"])
        return cls(
            scope["method"],
            f"{path}?" if scope["query_string"] else path,
            headers,
            int(length),
            headers.get(ADDRESS, connection[0]),
            connection,
            receive,
            limits,
            resources,
        )

    async def read_body(self) -> bytes:
        """Read the body, within the time that its size may take."""
        with make_file() as file:
            async with asyncio.timeout(self._limits.max_seconds(self.size)):
                while True:
                    event = await self._receive()
                    if event["type"] != "http.request":
                        raise EOFError
                    file.write(event.get("body", b""))
                    if not event.get("more_body", False):
                        break
            # The next event is the end of the connection.
            self._end = asyncio.ensure_future(self._receive())
            self.resources.callback(self._end.cancel)
            file.seek(0)
            return file.read()

    def has_hung_up(self) -> bool:
        """Return True if the client has closed the connection."""
        return self._end is not None and self._end.done()


def _check_headers(found: list[tuple[bytes, bytes]], most: int) -> dict[str, str]:
    if len(found) > most:
        raise RejectedError(431, "too many headers")
    headers: dict[str, str] = {}
    for name, value in found:
        key = name.decode("latin-1")
        if key in headers:
            raise RejectedError(400, "a header that comes twice")
        headers[key] = value.decode("latin-1")
        if not (value.isascii() and headers[key].isprintable()):
            raise RejectedError(400, "a header that is not plain text")
    return headers


async def send_response(send: Send, response: Response, limits: Limits) -> None:
    """Send a response, as fast as it is read, within the time its size may take."""
    size = response.size
    headers = [*response.headers, ("content-length", str(size))]
    start = {
        "type": "http.response.start",
        "status": response.status,
        "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers],
    }
    async with asyncio.timeout(limits.max_seconds(size)):
        await send(start)
        for chunk in response.chunks():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body"})
