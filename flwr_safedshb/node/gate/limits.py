"""How much of the gate one stranger, one node and all of them together may take."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields

# Addresses that are remembered at a time.
_MAX_PLACES = 4096


@dataclass(frozen=True)
class Limits:
    """Bounds of the gate; none of them is reached by Flower's own SuperNodes.

    Attributes
    ----------
    body_bytes : int
        The largest body with which a registered node pushes an object: Flower sends
        arrays in pieces of 5 MiB.
    unknown_body_bytes : int
        The largest body of a call whose key the SuperLink has not accepted yet, and of
        one that brings no object, beside the names of what it answers with.
    node_buffered_bytes : int
        Bodies and answers of one node on their way; beyond a few they are in files.
    large_calls : int
        Bodies above `unknown_body_bytes` that are in memory at a time, of all nodes.
    kept_bytes : int
        Objects that have been pulled by a node, for others to pull.
    headers, header_bytes : int
        Of one request.
    unknown_connections, unknown_by_address : int
        Connections whose key is not known yet; the oldest is closed for a new one.
    arrivals, address_arrivals : float
        New connections a second, from all addresses where no node is known and from
        each address; and up to two seconds' worth at once. Others are reset.
    node_connections, node_calls : int
        Of one node at a time: for a further connection its oldest is closed, and a
        further call waits.
    introductions, calls, object_calls : float
        A second: of keys that are not known yet, from one address; and of one node,
        without and with an object. Up to two seconds' worth may come at once, others
        wait: each writes a line into the SuperLink's log.
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
    object_seconds : float
        How long a call for an object is held that the server is still sending.
    tree_objects, tree_depth : int
        Objects of a reply, beyond twice those of the message it answers; their nesting.
    reply_bytes : int
        Bytes of a reply, beyond twice those of the message it answers.
    """

    body_bytes: int = 16 * 2**20
    unknown_body_bytes: int = 64 * 2**10
    node_buffered_bytes: int = 24 * 2**20
    large_calls: int = 2
    kept_bytes: int = 32 * 2**20
    headers: int = 32
    header_bytes: int = 16 * 2**10
    unknown_connections: int = 128
    unknown_by_address: int = 48
    arrivals: float = 64.0
    address_arrivals: float = 32.0
    node_connections: int = 12
    node_calls: int = 3
    introductions: float = 4.0
    calls: float = 20.0
    object_calls: float = 200.0
    handshake_seconds: float = 10.0
    header_seconds: float = 10.0
    idle_seconds: float = 120.0
    body_seconds: float = 10.0
    body_bytes_per_second: float = 128 * 2**10
    hold_seconds: float = 20.0
    poll_seconds: float = 0.1
    object_seconds: float = 2.0
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
    """Bytes that may be held at a time by an owner; more of them wait."""

    def __init__(self, each: int) -> None:
        self._each = each
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Event]] = {}

    @asynccontextmanager
    async def held(self, owner: str, size: int) -> AsyncIterator[None]:
        """Wait until so many bytes fit, and hold them."""
        size = min(size, self._each)
        while self._held[owner] + size > self._each:
            turn = asyncio.Event()
            self._waiting.setdefault(owner, deque()).append(turn)
            await turn.wait()
        self._held[owner] += size
        try:
            yield
        finally:
            self._held[owner] -= size
            if not self._held[owner]:
                del self._held[owner]
            for turn in self._waiting.pop(owner, ()):
                turn.set()


class Pace:
    """How often somebody may come: so many a second, and two seconds' worth at once."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        # When each has used up what it had.
        self._spent: OrderedDict[str, float] = OrderedDict()

    def admits(self, who: str) -> bool:
        """Say whether one may come now, and count it if so."""
        now = time.monotonic()
        spent = self._spent.pop(who, -math.inf)  # clocks start anywhere
        spent = max(spent, now - max(2.0, 1.0 / self._rate))
        admitted = spent + 1.0 / self._rate <= now
        self._spent[who] = spent + 1.0 / self._rate if admitted else spent
        if len(self._spent) > _MAX_PLACES:
            self._spent.popitem(last=False)
        return admitted

    async def turn(self, who: str) -> None:
        """Wait until one may come."""
        while not self.admits(who):
            await asyncio.sleep(1.0 / self._rate)


def place(address: str) -> str:
    """Return what counts as one address: of IPv6 the network that a line is given."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((int(found), 64), strict=False))
