"""What one node, one address and all of them together may take of the gate."""

import asyncio
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from google.protobuf.message import Message as Proto

from flwr_safedshb.node.flower_patches import fleet_api
from flwr_safedshb.node.flower_patches.fleet_api import fab_pb2
from flwr_safedshb.node.gate import limits as gate_limits
from flwr_safedshb.node.gate.limits import Limits, RateLimiter
from simulations.loopback.signing import sign_headers
from tests.node.gates import Node, Place, SuperLink, visited


def test_a_rate_limiter_admits_a_burst_and_then_so_many_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    limiter = RateLimiter(4.0)
    assert sum(limiter.admit("a") for _ in range(50)) == 8
    assert limiter.admit("b")
    now[0] += 1.0
    assert sum(limiter.admit("a") for _ in range(50)) == 4
    now[0] += 60.0
    assert sum(limiter.admit("a") for _ in range(50)) == 8


def test_a_rate_limiter_remembers_so_many_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limiter = RateLimiter(4.0)
    for number in range(9000):
        limiter.admit(str(number))
    assert len(limiter._empty_at) <= 4096


async def raw(place: Place, node: Node, name: str, request: Proto) -> bytes:
    """Return a call as it goes over the wire."""
    body = request.SerializeToString()
    lines = [f"POST /v1/fleet/{name} HTTP/1.1", "host: g"]
    lines += [f"content-length: {len(body)}"]
    lines += [f"{k}: {v}" for k, v in sign_headers(node.key).items()]
    return "\r\n".join([*lines, "", ""]).encode() + bytes(body)


def beat(node: Node) -> Proto:
    return fleet_api.CALLS["send-node-heartbeat"](
        node=node.proto(), heartbeat_interval=30
    )


def test_bodies_that_hostile_nodes_hold_stop_no_other(tmp_path: Path) -> None:
    """More of them than there is memory for: each waits in a file."""
    limits = Limits(hold_seconds=0.05)

    async def visit(place: Place) -> None:
        held = []
        for number in range(10, 18):
            async with place.node(number) as hostile:
                reader, writer = await place.connect()
                lines = ["POST /v1/fleet/push-object HTTP/1.1", "host: g"]
                lines += [f"content-length: {16 * 2**20}"]
                lines += [f"{k}: {v}" for k, v in sign_headers(hostile.key).items()]
                head = "\r\n".join([*lines, "", ""]).encode()
                writer.write(head + bytes(2**20))
                await writer.drain()
                held.append((reader, writer))
        async with place.node(5) as node:
            found = await node.call("send-node-heartbeat", beat(node))
            assert found.status_code == 200
            assert (await node.push_object("s", "0" * 64, bytes(2**20))).text
        for _, writer in held:
            writer.close()

    visited(tmp_path, visit, limits)


class Fabs(SuperLink):
    """A SuperLink with an app that no socket's buffers take in."""

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        answer = await super().__call__(request)
        if request.url.path.endswith("get-fab"):
            return httpx.Response(200, content=bytes(24_000_000))
        return answer


def test_answers_that_nobody_reads_are_few(tmp_path: Path) -> None:
    limits = Limits(node_requests=3)

    async def visit(place: Place) -> None:
        async with place.node(6) as hostile:
            app = fab_pb2.GetFabRequest(node=hostile.proto(), hash_str="a" * 64)
            held = []
            for _ in range(8):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", place.port, ssl=place.trusted, limit=1024
                )
                writer.write(await raw(place, hostile, "get-fab", app))
                held.append((reader, writer))
            while place.superlink.names().count("get-fab") < 3:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            # Each is on its way, and the next calls wait for them.
            assert place.superlink.names().count("get-fab") == 3
            async with place.node(5) as node:
                found = await node.call("send-node-heartbeat", beat(node))
                assert found.status_code == 200
                request = fab_pb2.GetFabRequest(node=node.proto(), hash_str="a" * 64)
                found = await node.call("get-fab", request)
                assert found.content == bytes(24_000_000)
            for _, writer in held:
                writer.transport.abort()

    visited(tmp_path, visit, limits, Fabs())


def test_answers_do_not_wait_to_be_confirmed(tmp_path: Path) -> None:
    """Otherwise each takes 40 ms more."""

    async def visit(place: Place) -> None:
        async with place.node(5):
            (connection,) = place.gate.server.server_state.connections
            option = (socket.IPPROTO_TCP, socket.TCP_NODELAY)
            plain = connection.transport.get_extra_info("socket")
            assert plain.getsockopt(*option)

    visited(tmp_path, visit)


def test_strangers_fill_no_log_of_the_superlink(tmp_path: Path) -> None:
    """It writes a line about every key that it does not know."""
    limits = Limits(hold_seconds=0.05, introductions=0.001)

    async def visit(place: Place) -> None:
        async with place.node(5) as node:  # the one that may come now
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3), place.node(6, False) as stranger:
                    await stranger.activate()
            found = await node.call("send-node-heartbeat", beat(node))
            assert found.status_code == 200

    names = visited(tmp_path, visit, limits).names()
    assert names == ["activate-node", "send-node-heartbeat"]


def test_the_first_call_comes_at_once_on_a_machine_that_has_just_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate_limits, "time", SimpleNamespace(monotonic=lambda: 0.0))
    limiter = gate_limits.RateLimiter(0.001)
    assert limiter.admit("node")
    assert not limiter.admit("node")


def test_a_node_that_calls_without_pause_waits(tmp_path: Path) -> None:
    limits = Limits(hold_seconds=0.05, calls=0.001)

    async def visit(place: Place) -> None:
        async with place.node(5) as node, place.node(6) as other:
            for one in (node, other):
                found = await one.call("send-node-heartbeat", beat(one))
                assert found.status_code == 200
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await node.call("send-node-heartbeat", beat(node))
            # Objects have a limiter of their own.
            assert (await node.pull_object("0" * 64)).status_code == 404

    names = visited(tmp_path, visit, limits).names()
    assert names.count("send-node-heartbeat") == 2


def test_nobody_is_waited_for_longer_than_flowers_own_node(tmp_path: Path) -> None:
    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            for seconds in (30.0, 1800.0):
                request = fleet_api.CALLS["send-node-heartbeat"](
                    node=node.proto(), heartbeat_interval=seconds
                )
                await node.call("send-node-heartbeat", request)

    calls = visited(tmp_path, visit).calls
    intervals = [r.heartbeat_interval for n, r, _ in calls if n.endswith("heartbeat")]
    assert intervals == [30.0, 30.0]


def test_bodies_of_one_node_wait_for_its_places(tmp_path: Path) -> None:
    """A node that holds as many requests as it may is not read another; others are."""
    limits = Limits(hold_seconds=0.05, node_requests=2)

    async def begin(place: Place, node: Node) -> asyncio.StreamWriter:
        """Announce two megabytes, and send all but the last byte."""
        lines = ["POST /v1/fleet/push-object HTTP/1.1", "host: g"]
        lines += [f"content-length: {2 * 2**20}"]
        lines += [f"{k}: {v}" for k, v in sign_headers(node.key).items()]
        _, writer = await place.connect()
        writer.write("\r\n".join([*lines, "", ""]).encode() + bytes(2 * 2**20 - 1))
        return writer

    async def visit(place: Place) -> None:
        async with place.node(6) as hostile, place.node(5) as node:
            (mine,) = [s for s in place.gate._known.values() if s.node_id == 6]
            writers = [await begin(place, hostile) for _ in range(3)]
            while not mine.requests.locked():
                await asyncio.sleep(0.01)
            late = asyncio.create_task(hostile.call("send-node-heartbeat", beat(node)))
            found = await node.call("send-node-heartbeat", beat(node))
            assert found.status_code == 200
            assert not late.done()
            late.cancel()
            for writer in writers:
                writer.transport.abort()

    visited(tmp_path, visit, limits)


def test_a_body_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            reader, writer = await place.connect()
            head = await raw(place, node, "send-node-heartbeat", beat(node))
            writer.write(head[:-1])
            assert b" 408 " in await reader.readline()
            writer.close()

    # Nodes come in before, so it is no less than they need.
    limits = Limits(hold_seconds=0.05, body_seconds=2.0)
    visited(tmp_path, visit, limits)


def test_the_body_of_a_stranger_is_not_read(tmp_path: Path) -> None:
    """Who signs with a key of their own may say no more than an activation takes."""

    async def visit(place: Place) -> None:
        async with place.node(5, registered=False) as node:
            found = await node.link.post(
                "/v1/fleet/push-object",
                content=b"x" * 100_000,
                headers=sign_headers(node.key),
            )
            assert found.status_code == 413

    assert not visited(tmp_path, visit).calls


def test_refusals_are_counted_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def visit(place: Place) -> None:
        for request in (b"POST / HTTP/1.1\r\nhost: g\r\n\r\n", b"nonsense\r\n\r\n"):
            for _ in range(10):
                reader, writer = await place.connect()
                writer.write(request)
                await reader.readline()
                writer.close()
        assert place.gate.refusals.total() == 10

    visited(tmp_path, visit)
    assert not [r for r in caplog.records if r.name.startswith(("safedshb", "uvicorn"))]
