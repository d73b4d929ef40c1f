"""What nodes need of a SuperLink, and nothing else, for the network to see.

A SuperLink serves three APIs on one port: Fleet for nodes, who sign every call, Control
for its operators, and Runtime for its own processes. In the free edition nobody has to
prove anything to the last two: who reaches the port can register nodes of their own and
submit runs. So the SuperLink listens on the loopback, and this gate passes on the calls
that a registered node makes.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

# Flower sends arrays in pieces of 5 MiB.
MAX_BYTES = 16 * 1024 * 1024
CALLS = frozenset(
    {
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "confirm-message-received",
        "pull-object",
        "push-object",
        "get-run",
        "get-fab",
    }
)
# Of one connection only, or set anew for the next one.
_HOP = frozenset(
    {
        "connection",
        "content-length",
        "host",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_SECONDS = 60.0


def gate(
    superlink: str,
    trusted: ssl.SSLContext,
    max_bytes: int = MAX_BYTES,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Starlette:
    """Return the gate of a SuperLink, an ASGI application.

    Parameters
    ----------
    superlink : str
        Its address, host:port.
    trusted : SSLContext
        Which certificates it may show.
    max_bytes : int
        The largest body of a call; larger ones are refused while they arrive.
    transport : optional
        In place of the network, for tests.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes={max_bytes} must be at least 1")
    inside = httpx.AsyncClient(
        base_url=f"https://{superlink}",
        verify=trusted,
        timeout=_SECONDS,
        transport=transport,
        trust_env=False,
    )

    async def forward(request: Request) -> Response:
        if request.path_params["call"] not in CALLS:
            return Response("not for nodes", 404)
        body = await _body(request, max_bytes)
        if body is None:
            return Response(f"more than {max_bytes} bytes", 413)
        try:
            answer = await inside.post(
                request.url.path, content=body, headers=_passed(request.headers.items())
            )
        except httpx.HTTPError:
            return Response("the SuperLink does not answer", 502)
        headers = dict(_passed(answer.headers.items()))
        headers.pop("content-encoding", None)  # httpx has decoded it
        return Response(answer.content, answer.status_code, headers)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with inside:
            yield

    routes = [Route("/v1/fleet/{call}", forward, methods=["POST"])]
    return Starlette(routes=routes, lifespan=lifespan)


async def _body(request: Request, max_bytes: int) -> bytes | None:
    """Return the body of a request, or None as soon as it is too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            return None
    return bytes(body)


def _passed(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers if name.lower() not in _HOP]
