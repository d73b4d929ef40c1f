"""How much of the gate one stranger, one node and all of them together may take."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Limits:
    """Bounds of the gate; none of them is reached by Flower's own SuperNodes.

    Attributes
    ----------
    body_bytes : int
        The largest body of a registered node's call: Flower sends arrays in pieces of
        5 MiB.
    unknown_body_bytes : int
        The largest body of a call whose key the SuperLink has not accepted yet.
    buffered_bytes, node_buffered_bytes : int
        Bodies in memory, over all connections and of one node.
    headers, header_bytes : int
        Of one request.
    unknown_connections, unknown_by_address : int
        Connections whose key is not known yet; the oldest is closed for a new one.
    node_connections, node_calls : int
        Of one node at a time.
    handshake_seconds, header_seconds, idle_seconds : float
        For the TLS handshake, for the headers of a request, and between two requests
        of a node. A stranger has no second request to wait for.
    body_seconds, body_bytes_per_second : float
        A body must come within the former and what its size takes at the latter.
    hold_seconds : float
        How long a call for work is held while there is none. Flower's client gives up
        after 30.
    poll_seconds : float
        How often the SuperLink is asked for it meanwhile, by a node that waits alone.
    tree_objects, tree_depth : int
        Objects of a reply, beyond twice those of the message it answers; their nesting.
    reply_bytes : int
        Bytes of a reply, beyond twice those of the message it answers.
    """

    body_bytes: int = 16 * 2**20
    unknown_body_bytes: int = 64 * 2**10
    buffered_bytes: int = 96 * 2**20
    node_buffered_bytes: int = 24 * 2**20
    headers: int = 32
    header_bytes: int = 16 * 2**10
    unknown_connections: int = 128
    unknown_by_address: int = 48
    node_connections: int = 16
    node_calls: int = 4
    handshake_seconds: float = 10.0
    header_seconds: float = 10.0
    idle_seconds: float = 120.0
    body_seconds: float = 10.0
    body_bytes_per_second: float = 128 * 2**10
    hold_seconds: float = 20.0
    poll_seconds: float = 0.1
    tree_objects: int = 16
    tree_depth: int = 8
    reply_bytes: int = 2**20

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(
                    f"{field.name}={getattr(self, field.name)} must be above 0"
                )


class Room:
    """Bytes that may be held at a time, over all and by owner; others wait."""

    def __init__(self, total: int, each: int) -> None:
        self._total, self._each = total, each
        self._held: Counter[str] = Counter()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def held(self, owner: str, size: int) -> AsyncIterator[None]:
        """Wait until so many bytes fit, and hold them."""
        size = min(size, self._each, self._total)
        async with self._changed:
            await self._changed.wait_for(lambda: self._fits(owner, size))
            self._held[owner] += size
        try:
            yield
        finally:
            async with self._changed:
                self._held[owner] -= size
                if not self._held[owner]:
                    del self._held[owner]
                self._changed.notify_all()

    def _fits(self, owner: str, size: int) -> bool:
        mine = self._held[owner] + size <= self._each
        return mine and self._held.total() + size <= self._total
