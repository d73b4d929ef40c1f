"""What somebody without a key can do to the gate: nothing that others notice."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from flwr_safedshb.node.gate.limits import Limits
from simulations.loopback.signing import sign_headers
from tests.node.gates import Place, visited

STRICT = Limits(
    hold_seconds=0.05,
    poll_seconds=0.01,
    unknown_connections=8,
    unknown_by_address=6,
)


async def said(place: Place, request: bytes) -> bytes:
    reader, writer = await place.connect()
    writer.write(request)
    try:
        return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST / HTTP/1.1\r\nhost: g\r\n" + b"a: b\r\n" * 40 + b"\r\n", b" 431 "),
        (b"POST / HTTP/1.1\r\nhost: g\r\n\r\n", b" 411 "),
        (
            b"POST / HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n"
            b"0\r\n\r\n",
            b" 411 ",
        ),
        (
            b"POST / HTTP/1.1\r\nhost: g\r\ncontent-length: 99999999999\r\n\r\n",
            b" 413 ",
        ),
        (
            b"POST / HTTP/1.1\r\nhost: g\r\ncontent-length: 5\r\n"
            b"content-length: 6\r\n\r\nhello",
            b" 400 ",
        ),
        (b"POST / HTTP/1.1\r\nhost: g\r\nx: a\r\nx: b\r\n\r\n", b" 400 "),
        (b"\x16\x03\x01 nonsense\r\n\r\n", b" 400 "),
    ],
)
def test_requests_that_no_node_makes(
    request_: bytes, status: bytes, tmp_path: Path
) -> None:
    async def visit(place: Place) -> None:
        answer = await said(place, request_)
        assert status in answer.split(b"\r\n", 1)[0], answer[:80]

    assert not visited(tmp_path, visit, STRICT).calls


@pytest.mark.parametrize(
    "line", [b"a: b\r\n" * 40_000, b"x: " + b"y" * 500_000], ids=["many", "long"]
)
def test_headers_are_read_to_their_bound_and_no_further(
    line: bytes, tmp_path: Path
) -> None:
    async def visit(place: Place) -> None:
        # The rest is on its way when the gate hangs up, so the answer may be lost.
        with suppress(ConnectionError):
            await said(place, b"POST / HTTP/1.1\r\n" + line)
        assert place.gate.listener.refusals["not HTTP"] == 1

    assert not visited(tmp_path, visit, STRICT).calls


def test_slow_headers_and_silence_are_not_waited_for(tmp_path: Path) -> None:
    async def visit(place: Place) -> None:
        slow = await said(place, b"POST / HTTP/1.1\r\nhost:")
        assert b" 408 " in slow
        silent = await said(place, b"")
        assert b" 408 " in silent

    visited(tmp_path, visit, replace(STRICT, header_seconds=0.3))


def test_a_body_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            lines = ["POST /v1/fleet/pull-messages HTTP/1.1", "host: g"]
            lines += ["content-length: 1000"]
            lines += [f"{k}: {v}" for k, v in sign_headers(node.key).items()]
            answer = await said(place, "\r\n".join([*lines, "", "x"]).encode())
            assert b" 408 " in answer

    # Nodes come in before, so it is no less than they need.
    limits = replace(STRICT, body_seconds=2.0, body_bytes_per_second=1e9)
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

    assert not visited(tmp_path, visit, STRICT).calls


def test_who_holds_connections_closes_their_own(tmp_path: Path) -> None:
    long = Limits(unknown_connections=8, unknown_by_address=6, hold_seconds=0.05)

    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            held = [await place.connect() for _ in range(30)]
            assert len(place.gate.listener._unknown) <= 6
            # The node's own connection is known, and a new one gets through.
            assert not (await node.pull()).messages_list
            async with place.node(6) as other:
                assert not (await other.pull()).messages_list
            for _, writer in held:
                writer.close()

    visited(tmp_path, visit, long)


def test_a_connection_without_a_handshake_does_not_stay(tmp_path: Path) -> None:
    async def visit(place: Place) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()

    visited(tmp_path, visit, replace(STRICT, handshake_seconds=0.3))


def test_refusals_are_counted_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def visit(place: Place) -> None:
        for _ in range(20):
            await said(place, b"POST / HTTP/1.1\r\nhost: g\r\n\r\n")
        assert place.gate.listener.refusals.total() >= 20

    visited(tmp_path, visit, STRICT)
    assert not [r for r in caplog.records if r.name.startswith("safedshb")]
