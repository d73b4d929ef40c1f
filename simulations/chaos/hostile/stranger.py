"""Somebody without a key, who keeps the gate as busy as a stranger can.

Run by the suite: ``python -m simulations.chaos.hostile.stranger KIND HOST:PORT SECONDS
CA``.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from cryptography.hazmat.primitives.asymmetric import ec

from flwr_safedshb.flower.speaker import signed

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
# Connections that are held at a time, and bodies.
_CONNECTIONS, _BODIES = 500, 50
_ADDRESSES = 8
_PATH = "/v1/fleet/push-object"


class Target:
    """The gate, from outside."""

    def __init__(self, address: str, trusted: str) -> None:
        host, _, port = address.rpartition(":")
        self.host, self.port = host, int(port)
        self.trusted = ssl.create_default_context(cafile=trusted)
        self._addresses = itertools.cycle(range(2, 2 + _ADDRESSES))

    async def connect(self, tls: bool = True) -> Streams:
        """Open a connection."""
        context = self.trusted if tls else None
        # From other addresses than the nodes', and from several.
        own = f"127.0.0.{next(self._addresses)}"
        return await asyncio.open_connection(
            self.host, self.port, ssl=context, local_addr=(own, 0)
        )


def request(size: int, **more: str) -> bytes:
    """Return the head of a call that is signed by a key that nobody knows."""
    headers = {"host": "gate", "content-length": str(size)}
    headers |= signed(ec.generate_private_key(ec.SECP384R1())) | more
    lines = [f"POST {_PATH} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


async def many_headers(target: Target) -> None:
    """Send 40,000 headers."""
    _, writer = await target.connect()
    writer.write(b"POST / HTTP/1.1\r\nhost: gate\r\n" + b"a: b\r\n" * 40_000)
    await writer.drain()
    writer.close()


async def held_body(target: Target) -> None:
    """Announce a body of 16 MiB, send some of it, and hold the rest."""
    reader, writer = await target.connect()
    writer.write(request(16 * 2**20) + bytes(2**16))
    await writer.drain()
    while await reader.read(2**16):
        pass


async def slow_headers(target: Target) -> None:
    """Send a header now and then, and never the last."""
    _, writer = await target.connect()
    writer.write(b"POST / HTTP/1.1\r\n")
    while True:
        writer.write(b"a: b\r\n")
        await writer.drain()
        await asyncio.sleep(1.0)


async def bare_connection(target: Target) -> None:
    """Open a connection and say nothing, not even hello."""
    reader, _ = await target.connect(tls=False)
    await reader.read()


async def aborted_upload(target: Target) -> None:
    """Begin to upload what a node may send before it is known, and hang up."""
    _, writer = await target.connect()
    writer.write(request(60_000) + bytes(1_000))
    await writer.drain()
    writer.transport.abort()


KINDS: dict[str, tuple[Callable[[Target], Awaitable[None]], int]] = {
    "many-headers": (many_headers, 8),
    "held-bodies": (held_body, _BODIES),
    "slow-headers": (slow_headers, _CONNECTIONS),
    "bare-connections": (bare_connection, _CONNECTIONS),
    "aborted-uploads": (aborted_upload, 8),
}


async def attack(kind: str, address: str, seconds: float, trusted: str) -> None:
    """Do the same over and over, so many at a time, until the time is over."""
    target = Target(address, trusted)
    what, at_a_time = KINDS[kind]
    until = time.monotonic() + seconds

    async def again() -> None:
        while time.monotonic() < until:
            with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                async with asyncio.timeout(max(until - time.monotonic(), 0.01)):
                    await what(target)
            # Whoever is thrown out comes back, though not at once.
            await asyncio.sleep(0.2)

    await asyncio.gather(*(again() for _ in range(at_a_time)))


if __name__ == "__main__":
    asyncio.run(attack(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4]))
