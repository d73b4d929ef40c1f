"""How much of the gate a stranger, a node, and all of them together may take."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields

# Clients whose rate is remembered at a time.
_MAX_CLIENTS = 4096


@dataclass(frozen=True)
class Limits:
    """Bounds of the gate; none of them is reached by Flower's own SuperNodes.

    A client is unknown until the SuperLink has accepted a call that its key signed.
    Whoever may do something so many times a second may do two seconds' worth at once.
    """

    # The largest body of a known node's object: Flower sends arrays in pieces of 5 MiB.
    body_bytes: int = 16 * 2**20
    # The largest body of an unknown client's call, and of a call without an object,
    # beside the object names that a reply needs.
    unknown_body_bytes: int = 64 * 2**10
    # Bodies and responses of one node on their way; beyond a few they are in files.
    node_buffered_bytes: int = 24 * 2**20
    # Bodies above `unknown_body_bytes` that are in memory at a time, of all nodes.
    large_calls: int = 2
    # Objects that have been pulled by a node, cached for others.
    kept_bytes: int = 32 * 2**20
    # Headers of one request, and their bytes.
    headers: int = 32
    header_bytes: int = 16 * 2**10
    # Connections of unknown clients, in all and by address; the oldest is closed for a
    # new one.
    unknown_connections: int = 128
    unknown_by_address: int = 48
    # New connections a second, from all addresses where no node is known and from each
    # address. Others are reset.
    arrivals: float = 64.0
    address_arrivals: float = 32.0
    # Of one node: for a further connection its oldest is closed; a further call waits.
    node_connections: int = 12
    node_calls: int = 3
    # Calls a second, each a line in the SuperLink's log: of unknown clients from one
    # address, and of one node without and with an object. Others wait.
    introductions: float = 4.0
    calls: float = 20.0
    object_calls: float = 200.0
    # For the TLS handshake, for the headers of a request, and between two requests of a
    # node. Unknown clients have no second request to wait for.
    handshake_seconds: float = 10.0
    header_seconds: float = 10.0
    idle_seconds: float = 120.0
    # A body must come within the former plus what its size takes at the latter.
    body_seconds: float = 10.0
    body_bytes_per_second: float = 128 * 2**10
    # How long a call for work is held while there is none (Flower's client gives up
    # after 30), and how often a node that waits alone has the SuperLink asked for it.
    hold_seconds: float = 20.0
    poll_seconds: float = 0.1
    # How long a call is held for an object that the server is still sending.
    object_seconds: float = 2.0
    # Objects and bytes of a reply, beyond twice those of its question; their nesting.
    tree_objects: int = 16
    tree_depth: int = 8
    reply_bytes: int = 2**20

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"{field.name}={value} must be above 0")


class ByteQuota:
    """Bytes that each owner may hold at a time; whoever wants more waits."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Event]] = {}

    @asynccontextmanager
    async def hold(self, owner: str, size: int) -> AsyncIterator[None]:
        """Wait until so many bytes fit (at most the quota), and hold them."""
        size = min(size, self._max_bytes)
        while self._held[owner] + size > self._max_bytes:
            freed = asyncio.Event()
            self._waiting.setdefault(owner, deque()).append(freed)
            await freed.wait()
        self._held[owner] += size
        try:
            yield
        finally:
            self._held[owner] -= size
            if not self._held[owner]:
                del self._held[owner]
            for freed in self._waiting.pop(owner, ()):
                freed.set()


class RateLimiter:
    """A token bucket for each client: `rate` a second, bursts of two seconds' worth."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        # When each client's tokens were used up.
        self._empty_at: OrderedDict[str, float] = OrderedDict()

    def admit(self, client: str) -> bool:
        """Take a token of a client; return False if there is none."""
        now = time.monotonic()
        # A monotonic clock may start anywhere, also at zero.
        empty_at = self._empty_at.pop(client, -math.inf)
        empty_at = max(empty_at, now - max(2.0, 1.0 / self._rate))
        admitted = empty_at + 1.0 / self._rate <= now
        self._empty_at[client] = empty_at + (1.0 / self._rate if admitted else 0.0)
        if len(self._empty_at) > _MAX_CLIENTS:
            self._empty_at.popitem(last=False)
        return admitted

    async def wait_turn(self, client: str) -> None:
        """Wait until there is a token, and take it."""
        while not self.admit(client):
            await asyncio.sleep(1.0 / self._rate)


def group_address(address: str) -> str:
    """Return what counts as one address: of IPv6 the /64 that a line is given."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((int(found), 64), strict=False))
