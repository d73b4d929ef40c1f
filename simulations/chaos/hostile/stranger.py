"""Somebody without a key, who keeps the gate as busy as a stranger can.

Run by the suite: ``python -m simulations.chaos.hostile.stranger KIND HOST:PORT SECONDS
CA OUTPUT``. It waits for so many seconds, writes down that it begins, and attacks for
as long.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from flwr_safedshb.node.flower_patches.fleet_api import fleet_pb2
from simulations.chaos.trace import append_entry
from simulations.loopback.signing import Key, public_key_pem, sign_headers

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

    async def open_link(self, tls: bool = True) -> Streams:
        """Open a connection."""
        context = self.trusted if tls else None
        # From other addresses than the nodes', and from several.
        own = f"127.0.0.{next(self._addresses)}"
        return await asyncio.open_connection(
            self.host, self.port, ssl=context, local_addr=(own, 0)
        )


def request(size: int, key: Key | None = None) -> bytes:
    """Return the head of a call that is signed by a key that nobody knows."""
    headers = {"host": "gate", "content-length": str(size)}
    headers |= sign_headers(key or ec.generate_private_key(ec.SECP384R1()))
    lines = [f"POST {_PATH} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


async def send_many_headers(target: Target) -> None:
    """Send 40,000 headers."""
    _, writer = await target.open_link()
    writer.write(b"POST / HTTP/1.1\r\nhost: gate\r\n" + b"a: b\r\n" * 40_000)
    await writer.drain()
    writer.close()


async def hold_body(target: Target) -> None:
    """Announce a body of 16 MiB, send some of it, and hold the rest."""
    reader, writer = await target.open_link()
    writer.write(request(16 * 2**20) + bytes(2**16))
    await writer.drain()
    while await reader.read(2**16):
        pass


async def trickle_headers(target: Target) -> None:
    """Send a header now and then, and never the last."""
    _, writer = await target.open_link()
    writer.write(b"POST / HTTP/1.1\r\n")
    while True:
        writer.write(b"a: b\r\n")
        await writer.drain()
        await asyncio.sleep(1.0)


async def open_bare_connection(target: Target) -> None:
    """Open a connection and say nothing, not even hello."""
    reader, _ = await target.open_link(tls=False)
    await reader.read()


async def abort_upload(target: Target) -> None:
    """Begin to upload what a node may send before it is known, and hang up."""
    _, writer = await target.open_link()
    writer.write(request(60_000) + bytes(1_000))
    await writer.drain()
    writer.transport.abort()


async def abort_handshake(target: Target) -> None:
    """Shake hands, and hang up."""
    _, writer = await target.open_link()
    writer.transport.abort()


async def trickle_hello(target: Target) -> None:
    """Begin to shake hands, byte by byte, and never finish."""
    _, writer = await target.open_link(tls=False)
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300)
    for byte in hello:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.5)


async def use_unknown_key(target: Target) -> None:
    """Ask to be let in with a key that nobody has registered."""
    key = ec.generate_private_key(ec.SECP384R1())
    ask = fleet_pb2.ActivateNodeRequest(
        public_key=public_key_pem(key), heartbeat_interval=30
    )
    body = ask.SerializeToString()
    reader, writer = await target.open_link()
    head = request(len(body), key).replace(_PATH.encode(), b"/v1/fleet/activate-node")
    writer.write(head + body)
    await reader.readline()
    writer.close()


async def send_odd_requests(target: Target) -> None:
    """Send what proxies and servers may read in two ways."""
    for head in ODD:
        reader, writer = await target.open_link()
        writer.write(b"POST /v1/fleet/pull-messages " + head)
        await reader.readline()
        writer.transport.abort()


_INSIDE = b"POST /v1/control/start-run HTTP/1.1\r\nhost: g\r\ncontent-length: 0\r\n\r\n"
ODD = [
    b"HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n"
    b"0\r\n\r\n" + _INSIDE,
    b"HTTP/1.1\r\nhost: g\r\ncontent-length: 0\r\ncontent-length: 90\r\n\r\n" + _INSIDE,
    b"HTTP/1.1\r\nhost: g\r\ncontent-length: +5\r\n\r\nhello",
    b"HTTP/1.1\r\nhost: g\r\ncontent-length: 0\r\nx: a\r\n b\r\n\r\n" + _INSIDE,
    b"HTTP/1.1\r\nhost: g\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n",
    b"HTTP/1.0\r\n\r\n" + _INSIDE,
    b"HTTP/1.1\r\nhost : g\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1\nhost: g\ncontent-length: 0\n\n" + _INSIDE,
    b"HTTP/2.0\r\n\r\nSM\r\n\r\n",
]

KINDS: dict[str, tuple[Callable[[Target], Awaitable[None]], int]] = {
    "many-headers": (send_many_headers, 8),
    "held-bodies": (hold_body, _BODIES),
    "slow-headers": (trickle_headers, _CONNECTIONS),
    "bare-connections": (open_bare_connection, _CONNECTIONS),
    "aborted-uploads": (abort_upload, 8),
    "handshakes": (abort_handshake, 100),
    "half-hellos": (trickle_hello, _CONNECTIONS),
    "unknown-keys": (use_unknown_key, 50),
    "odd-requests": (send_odd_requests, 8),
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


async def wait_and_attack(
    kind: str, address: str, seconds: float, trusted: str, output: Path
) -> None:
    """Let calls be timed without the attack first, and then with it."""
    await asyncio.sleep(seconds)
    append_entry(output, {"begin": time.monotonic()})
    await attack(kind, address, seconds, trusted)


if __name__ == "__main__":
    kind, address, seconds, trusted, output = sys.argv[1:]
    asyncio.run(wait_and_attack(kind, address, float(seconds), trusted, Path(output)))
