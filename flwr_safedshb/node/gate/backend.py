"""The SuperLink, as the gate calls it for nodes."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress

import httpx
from google.protobuf.message import Message

from flwr_safedshb.node.flower_patches import fleet_api
from flwr_safedshb.node.gate.http import RejectedError, Request, Response, SpooledBody
from flwr_safedshb.node.gate.limits import ByteQuota, Limits
from flwr_safedshb.node.gate.object_cache import ObjectCache

PREFIX = "/v1/fleet/"
_TIMEOUT_SECONDS = 60.0
_MAX_POLL_FACTOR = 10


class Backend:
    """Call a SuperLink; what passes is rewritten here: path, headers and request.

    Parameters
    ----------
    superlink : str
        Its address, host:port.
    trusted : SSLContext
        Which certificates it may show.
    limits : Limits
    transport : optional
        In place of the network, for tests.
    """

    def __init__(
        self,
        superlink: str,
        trusted: ssl.SSLContext,
        limits: Limits,
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
        self.objects = ObjectCache(limits.kept_bytes)
        self._responses = ByteQuota(limits.node_buffered_bytes)
        self._fetches = asyncio.Semaphore(limits.node_calls)
        self._has_work = asyncio.Event()
        self._num_waiting = 0

    async def call(
        self,
        calls: asyncio.Semaphore,
        owner: str,
        request: Request,
        name: str,
        to: Message,
    ) -> Response:
        """Make a call for a node, which has a few of them at a time."""
        async with calls:
            return await self._call(request, name, to, owner)

    async def fetch(self, request: Request, name: str, to: Message) -> Response:
        """Make a call for all nodes: what slows one of them does not slow it."""
        async with self._fetches:
            return await self._call(request, name, to, None)

    async def hold_quota(self, owner: str, request: Request, size: int) -> None:
        """Wait until a response of so many bytes fits into a node's quota."""
        if size > self.limits.unknown_body_bytes:
            held = self._responses.hold(owner, size)
            await request.resources.enter_async_context(held)

    async def _call(
        self, request: Request, name: str, message: Message, owner: str | None
    ) -> Response:
        headers = {
            k: v for k, v in request.headers.items() if k in fleet_api.REQUEST_HEADERS
        }
        body = SpooledBody()
        request.resources.callback(body.close)
        try:
            async with self.client.stream(
                "POST",
                f"{PREFIX}{name}",
                content=message.SerializeToString(deterministic=True),
                headers=headers,
            ) as found:
                if owner is not None:
                    size = int(found.headers.get("content-length", 0))
                    await self.hold_quota(owner, request, size)
                async for chunk in found.aiter_bytes():
                    body.append(chunk)
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
