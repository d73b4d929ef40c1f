"""The SuperLink, as the gate calls it for nodes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import httpx
from google.protobuf.message import Message

from flwr_safedshb.node.flower_patches import fleet_api
from flwr_safedshb.node.flower_patches.fleet_api import message_pb2
from flwr_safedshb.node.gate.limits import Limits
from flwr_safedshb.node.gate.object_cache import ObjectCache
from flwr_safedshb.node.gate.request import RejectedError, Request, Response, make_file

PREFIX = "/v1/fleet/"
_TIMEOUT_SECONDS = 60.0
_MAX_POLL_FACTOR = 10
_CHUNK_BYTES = 512 * 2**10
_FIELDS = message_pb2.PushObjectRequest.DESCRIPTOR.fields_by_name
_CONTENT_FIELD: int = _FIELDS["object_content"].number


class Backend:
    """Call a SuperLink; what passes is rewritten here: path, headers and request.

    Parameters
    ----------
    superlink : str
        Its address, host:port.
    trusted : SSLContext
        Which certificates it may show.
    limits : Limits
    cache : Path
        A folder for the objects that nodes pull.
    transport : optional
        In place of the network, for tests.
    """

    def __init__(
        self,
        superlink: str,
        trusted: ssl.SSLContext,
        limits: Limits,
        cache: Path,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.limits = limits
        self.client = httpx.AsyncClient(
            base_url=f"https://{superlink}",
            verify=trusted,
            timeout=_TIMEOUT_SECONDS,
            transport=transport,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
        )
        self.objects = ObjectCache(cache, limits.cached_bytes)
        self._fetches = asyncio.Semaphore(limits.node_calls)
        self._has_work = asyncio.Event()
        self._num_waiting = 0

    async def call(
        self, calls: asyncio.Semaphore, request: Request, name: str, to: Message
    ) -> Response:
        """Make a call for a node, which has a few of them at a time."""
        async with calls:
            return await self._call(request, name, to)

    async def push(
        self,
        calls: asyncio.Semaphore,
        request: Request,
        to: message_pb2.PushObjectRequest,
        content: IO[bytes],
    ) -> Response:
        """Push an object for a node, a few bytes at a time; `to` is without them."""
        size = content.seek(0, 2)
        content.seek(0)
        # In protobuf a field is its number and type, its length, and its bytes.
        head = to.SerializeToString() + encode_varint(_CONTENT_FIELD << 3 | 2)
        head += encode_varint(size)

        async def stream() -> AsyncIterator[bytes]:
            yield head
            while chunk := content.read(_CHUNK_BYTES):
                yield chunk

        more = {"content-length": str(len(head) + size)}
        async with calls:
            return await self._post(request, "push-object", stream(), more)

    async def fetch(self, request: Request, name: str, to: Message) -> Response:
        """Make a call for all nodes: what slows one of them does not slow it."""
        async with self._fetches:
            return await self._call(request, name, to)

    async def _call(self, request: Request, name: str, message: Message) -> Response:
        content = message.SerializeToString(deterministic=True)
        return await self._post(request, name, content, {})

    async def _post(
        self,
        request: Request,
        name: str,
        content: bytes | AsyncIterator[bytes],
        more: dict[str, str],
    ) -> Response:
        headers = more | {
            k: v for k, v in request.headers.items() if k in fleet_api.REQUEST_HEADERS
        }
        body = request.resources.enter_context(make_file())
        try:
            async with self.client.stream(
                "POST",
                f"{PREFIX}{name}",
                content=content,
                headers=headers,
            ) as found:
                async for chunk in found.aiter_bytes():
                    body.write(chunk)
        except httpx.HTTPError as error:
            raise RejectedError(502, "the SuperLink does not answer") from error
        passed = tuple(
            (key, value)
            for key, value in found.headers.items()
            if key.lower() in fleet_api.RESPONSE_HEADERS
        )
        return Response(found.status_code, body, passed)

    async def wait_for_work(self) -> None:
        """Wait before the next poll for work, or until another node was given some.

        A round is for all nodes. So the more wait, the longer does each: up to ten of
        them poll the SuperLink together as often as one would alone.
        """
        self._num_waiting += 1
        seconds = self.limits.poll_seconds * min(self._num_waiting, _MAX_POLL_FACTOR)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._has_work.wait()
        finally:
            self._num_waiting -= 1

    def announce_work(self) -> None:
        """Wake those who wait for work."""
        self._has_work.set()
        self._has_work = asyncio.Event()


def encode_varint(number: int) -> bytes:
    """Return a number as protobuf writes it: seven bits a byte, the lowest first."""
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])
