"""The kit's HAProxy: what somebody without a key can do there, nobody else notices."""

import asyncio
import socket
import ssl
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.supernode.fleet_http_connection import http_request_response

from flwr_safedshb.node.flower_patches import fleet_api
from flwr_safedshb.node.flower_patches.supernode import default_limits, keep_connections
from flwr_safedshb.node.gate.limits import Limits
from tests.guard import HANGS
from tests.node.gates import (
    QUICK,
    Node,
    Place,
    SuperLink,
    certificate,
    proxy,
    question,
    reply,
    running,
    visited,
)
from tests.node.test_flowers_node_at_the_gate import asking
from tests.node.test_replies_at_the_gate import sent
from tests.node.test_tricks_at_the_gate import written

pytestmark = pytest.mark.process

ME = 5
PUSH = b"POST /v1/fleet/push-object HTTP/1.1\r\nhost: g\r\n"
PULL = b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: g\r\n"


async def said(place: Place, request: bytes) -> bytes:
    reader, writer = await place.connect()
    writer.write(request)
    try:
        return await reader.readline()
    finally:
        writer.close()


REQUESTS = {
    "many headers": (PUSH + b"a: b\r\n" * 40 + b"\r\n", b" 400 "),
    "no length": (PUSH + b"\r\n", b" 411 "),
    "chunks": (PUSH + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", b" 411 "),
    "a gigabyte": (PUSH + b"content-length: 1073741824\r\n\r\n", b" 413 "),
    "padded": (PULL + b"content-length: 70000\r\n\r\n", b" 413 "),
    "two lengths": (
        PUSH + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b" 400 ",
    ),
    "not HTTP": (b"\x16\x03\x01 nonsense\r\n\r\n", b" 400 "),
    "another method": (b"GET /v1/fleet/get-run HTTP/1.1\r\nhost: g\r\n\r\n", b" 405 "),
    "unsigned": (PULL + b"content-length: 0\r\n\r\n", b" 401 "),
    **{
        path: (f"POST {path} HTTP/1.1\r\nhost: g\r\n\r\n".encode(), b" 404 ")
        for path in (
            *("/", "/docs", "/v1/control/start-run", "/v1/runtime/acquire-task"),
            *("/v1/fleet/register-node", "/v1/fleet/../control/start-run"),
            *("/v1/fleet/..%2Fcontrol%2Fstart-run", "//v1/fleet/pull-messages"),
            *("/v1/fleet/pull-messages?x=1", "/v1/fleet/pull-messages/x"),
        )
    },
}


def test_requests_that_no_node_makes(tmp_path: Path) -> None:
    async def visit(place: Place) -> None:
        for name, (request, status) in REQUESTS.items():
            assert status in await said(place, request), name
        # The gate itself has seen no more than what nobody signed.
        assert [*place.gate.refusals] == ["the call is not signed by a node's key"]

    assert not visited(tmp_path, visit, proxied=True).calls


@pytest.mark.parametrize(
    "line", [b"a: b\r\n" * 40_000, b"x: " + b"y" * 500_000], ids=["many", "long"]
)
def test_headers_are_read_to_their_bound_and_no_further(
    line: bytes, tmp_path: Path
) -> None:
    async def visit(place: Place) -> None:
        # The rest is on its way when the proxy hangs up, so the answer may be lost.
        with suppress(ConnectionError):
            assert b" 400 " in await said(place, PUSH + line)
        assert not place.gate.refusals

    assert not visited(tmp_path, visit, proxied=True).calls


def test_slow_headers_are_not_waited_for(tmp_path: Path) -> None:
    async def visit(place: Place) -> None:
        answer = await said(place, b"POST / HTTP/1.1\r\nhost:")
        assert not answer or b" 408 " in answer

    visited(tmp_path, visit, proxied=True)


def test_a_node_and_its_reply_come_through(tmp_path: Path) -> None:
    """A reply of several megabytes, whose bodies stream through the proxy."""

    async def visit(place: Place) -> None:
        async with place.node(ME) as node:
            message = question(ME, size=2_000_000)
            place.superlink.waiting[ME] = [message]
            assert (await node.pull()).messages_list
            assert (await node.confirm(message.object_id)).status_code == 200
            pushed = fleet_api.pack_message(reply(message, size=2_000_000))
            assert (await sent(node, pushed)).status_code == 200
            assert {*pushed.objects} <= {*place.superlink.objects}

    visited(tmp_path, visit, proxied=True)


def beat(node: Node) -> bytes:
    request = fleet_api.CALLS["send-node-heartbeat"](
        node=node.proto(), heartbeat_interval=30
    )
    return bytes(request.SerializeToString())


def test_the_gate_is_told_where_a_client_is_and_by_nobody_else(tmp_path: Path) -> None:
    """Strangers have few calls from each address, whatever they say it is."""

    async def visit(place: Place) -> None:
        async with place.node(ME), place.node(6, registered=False) as stranger:
            name = "send-node-heartbeat"
            more = (f"x-forwarded-for: 10.0.0.{n}" for n in range(2))
            late = []
            for header in more:
                _, writer = await place.connect()
                writer.write(written(stranger, name, beat(stranger), header))
                late.append(writer)
            await asyncio.sleep(0.5)
            for writer in late:
                writer.close()

    limits = Limits(hold_seconds=0.05, introductions=0.001)
    assert visited(tmp_path, visit, limits, proxied=True).names() == ["activate-node"]


def test_who_comes_too_fast_is_reset_and_nodes_come_in(tmp_path: Path) -> None:
    """Not closed in a handshake, after which Flower's SuperNode would not try again."""

    async def visit(place: Place) -> None:
        async with place.node(ME) as node:
            readers, links = [], []
            for _ in range(100):
                with suppress(ConnectionResetError):
                    reader, link = await asyncio.open_connection(
                        "127.0.0.1", place.port, local_addr=("127.0.0.9", 0)
                    )
                    readers.append(reader)
                    links.append(link)
            reset = [reader for reader in readers if reader.exception()]
            while len(readers) - len(reset) > 48:
                await asyncio.sleep(0.01)
                reset = [reader for reader in readers if reader.exception()]
            assert all(isinstance(r.exception(), ConnectionResetError) for r in reset)
            # Where a node is known, and elsewhere, others come in.
            assert not (await node.pull()).messages_list
            async with place.node(6) as other:
                assert not (await other.pull()).messages_list
            for link in links:
                link.transport.abort()

    visited(tmp_path, visit, proxied=True)


def is_reset(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        connection.recv(1)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    return False


def test_a_node_that_is_there_needs_no_new_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user of its machine may come from the same address, without pause."""
    monkeypatch.setattr(default_limits(), "keepalive_expiry", 0.1)
    keep_connections()
    key = ec.generate_private_key(ec.SECP384R1())
    trusted = tmp_path / "gate.crt"
    found: list[object] = []

    def work(place: Place) -> None:
        with http_request_response(
            f"127.0.0.1:{place.port}",
            insecure=False,
            root_certificates=trusted.read_bytes(),
            authentication_keys=(key, key.public_key()),
            max_retries=0,
        ) as (_, receive, *_):
            found.append(receive())
            time.sleep(0.2)  # longer than what is idle would be kept
            others = [
                socket.create_connection(("127.0.0.1", place.port)) for _ in range(300)
            ]
            while not any(map(is_reset, others)):
                time.sleep(0.01)
            found.append(receive())  # whose error would be swallowed

    async def visit(place: Place) -> None:
        await asyncio.to_thread(work, place)
        assert len(found) == 2

    visited(tmp_path, visit, QUICK, asking(key), proxied=True)


def test_the_gate_sees_which_of_a_nodes_connections_are_open(tmp_path: Path) -> None:
    """So it knows whether a node that comes again is still there."""

    async def visit(place: Place) -> None:
        async with place.node(ME) as node:
            reader, writer = await place.connect()
            writer.write(written(node, "send-node-heartbeat", beat(node)))
            assert b" 200 " in await reader.readline()
            (mine,) = place.gate._known.values()
            both = mine.connections & place.gate._open_connections()
            assert len(both) == 2
            writer.close()
            while len(mine.connections & place.gate._open_connections()) > 1:
                await asyncio.sleep(0.01)
            assert not (await node.pull()).messages_list
            assert len(mine.connections & place.gate._open_connections()) == 1

    visited(tmp_path, visit, proxied=True)


def test_a_gate_that_is_started_again_is_waited_for(tmp_path: Path) -> None:
    """Its nodes are known to it, and what they were asked."""
    superlink = SuperLink()

    async def story() -> None:
        message = question(ME)
        async with (
            running(tmp_path, QUICK, superlink, proxied=True) as place,
            place.node(ME) as node,
        ):
            superlink.waiting[ME] = [message]
            assert (await node.pull()).messages_list
        async with (
            running(tmp_path, QUICK, superlink, proxied=True) as place,
            httpx.AsyncClient(
                base_url=f"https://127.0.0.1:{place.port}",
                verify=place.trusted,
                trust_env=False,
            ) as link,
        ):
            (given,) = (await Node(link, ME, node.key).pull()).messages_list
            assert given.metadata.message_id == message.object_id

    asyncio.run(story())


def test_an_ipv6_network_counts_as_one_address(tmp_path: Path) -> None:
    """A line is given a network of 2^64 addresses."""
    seen: list[bytes] = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def story() -> None:
        shown, _ = certificate(tmp_path)
        trusted = ssl.create_default_context(cafile=str(shown))
        trusted.check_hostname = False  # it is of another address
        async with (
            asyncio.timeout(HANGS),
            await asyncio.start_server(note, "127.0.0.1", 0) as gate,
            proxy(shown, gate.sockets[0].getsockname()[1], "::1") as port,
        ):
            reader, writer = await asyncio.open_connection("::1", port, ssl=trusted)
            writer.write(PULL + b"content-length: 0\r\n\r\n")
            assert b" 200 " in await reader.readline()
            writer.close()

    asyncio.run(story())
    assert b"\r\nx-forwarded-for: ::\r\n" in seen[0]
