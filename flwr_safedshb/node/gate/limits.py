"""How much of the gate a node may take; what a stranger may, the proxy bounds."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
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
    # Objects of the server's that are cached in files.
    cached_bytes: int = 2**30
    # Headers of one request.
    headers: int = 32
    # Of one node, a further one waits: requests that are read, handled or answered at a
    # time, and calls of the SuperLink.
    node_requests: int = 12
    node_calls: int = 3
    # Calls a second, each a line in the SuperLink's log: of unknown clients from one
    # address, and of one node without and with an object. Others wait.
    introductions: float = 4.0
    calls: float = 20.0
    object_calls: float = 200.0
    # A body must come, or be read, within the former plus what its size takes at the
    # latter.
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

    def max_seconds(self, size: int) -> float:
        """Return how long so many bytes may take, in or out."""
        return self.body_seconds + size / self.body_bytes_per_second


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
