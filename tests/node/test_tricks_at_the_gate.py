"""Calls that are made of little and take much, and hang-ups at the wrong moment."""

import asyncio
import base64
import socket
import struct
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, RecordDict

from flwr_safedshb.flower.compat import set_process_run
from flwr_safedshb.node.flower_patches import fleet_api
from flwr_safedshb.node.flower_patches.fleet_api import fleet_pb2, pack_message
from flwr_safedshb.node.gate.limits import Limits
from simulations.loopback.signing import sign_headers
from tests.node.gates import RUN, Node, Place, bare, question, visited
from tests.node.test_replies_at_the_gate import sent

ME, OTHER = 5, 6


def written(node: Node, name: str, body: bytes, *more: str) -> bytes:
    """Return a call as it goes over the wire."""
    headers = {
        "host": "gate",
        "content-length": str(len(body)),
        **sign_headers(node.key),
    }
    lines = [f"POST /v1/fleet/{name} HTTP/1.1"]
    lines += [f"{key}: {value}" for key, value in headers.items()]
    return "\r\n".join([*lines, *more, "", ""]).encode() + body


@pytest.mark.parametrize("name", ["push-messages", "pull-messages", "get-run"])
def test_a_long_call_without_an_object_is_not_read(name: str, tmp_path: Path) -> None:
    """Two bytes stand for a message of fifty, and megabytes for seconds of reading."""

    async def visit(place: Place) -> None:
        async with place.node(ME) as node:
            place.superlink.waiting[ME] = [question(ME)]
            await node.pull()
            reader, writer = await place.connect()
            writer.write(written(node, name, b"\x12\x00" * 2**21)[: 2**16])
            await writer.drain()  # the rest need not come
            assert b" 413 " in await reader.readline()
            writer.transport.abort()
            refused = place.gate.refusals
            assert refused["a long call that brings no object"] == 1

    visited(tmp_path, visit)


def of_many_arrays(count: int, value: float) -> RecordDict:
    arrays = {str(i): Array(np.full(1, value + i, np.float32)) for i in range(count)}
    return RecordDict({"arrays": ArrayRecord(arrays)})


def test_a_model_of_many_arrays_gets_through(tmp_path: Path) -> None:
    set_process_run(RUN)
    message = Message(of_many_arrays(80, 0.5), ME, "train", ttl=60.0)
    message.metadata.__dict__["_message_id"] = message.object_id

    async def visit(place: Place) -> None:
        async with place.node(ME) as node:
            place.superlink.waiting[ME] = [message]
            await node.pull()
            answer = pack_message(
                Message(of_many_arrays(80, 0.7), reply_to=bare(message))
            )
            request = fleet_pb2.PushMessagesRequest(message_object_trees=[answer.tree])
            assert request.ByteSize() > place.gate.limits.unknown_body_bytes
            assert (await sent(node, answer)).status_code == 200

    limits = Limits(hold_seconds=0.05, poll_seconds=0.01, unknown_body_bytes=4096)
    visited(tmp_path, visit, limits)


def test_calls_that_are_sent_ahead_are_answered_in_order(tmp_path: Path) -> None:
    async def visit(place: Place) -> None:
        async with place.node(ME) as node:
            reader, writer = await place.connect()
            ask = fleet_pb2.PullMessagesRequest(node=node.proto()).SerializeToString()
            inside = b"POST /v1/control/start-run HTTP/1.1\r\ncontent-length: 0\r\n\r\n"
            writer.write(written(node, "pull-messages", ask) * 2 + inside)
            answers = [await answered(reader) for _ in range(2)]
            assert [status for status, _ in answers] == ["200", "200"]
            assert b" 400 " in await reader.readline()
            writer.transport.abort()

    assert {*visited(tmp_path, visit).names()} == {"activate-node", "pull-messages"}


async def answered(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    size = int(head.partition("content-length: ")[2].partition("\r\n")[0])
    return head.split(" ")[1], await reader.readexactly(size)


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("transfer-encoding: chunked", b" 411 "),
        ("trailer: content-length", b" 200 "),
        ("content-length: 0", b" 400 "),
        ("host: elsewhere", b" 400 "),
        ("x-forwarded-for: 127.0.0.1", b" 200 "),
        ("connection: upgrade\r\nupgrade: h2c", b" 200 "),
        ("expect: 100-continue", b" 200 "),
    ],
)
def test_headers_that_say_a_second_thing(
    header: str, status: bytes, tmp_path: Path
) -> None:
    async def visit(place: Place) -> None:
        async with place.node(ME) as node:
            reader, writer = await place.connect()
            ask = fleet_pb2.PullMessagesRequest(node=node.proto()).SerializeToString()
            writer.write(written(node, "pull-messages", ask, header))
            line = await reader.readline()
            if b" 100 " in line:
                await reader.readline()
                line = await reader.readline()
            assert status in line
            writer.transport.abort()

    superlink = visited(tmp_path, visit)
    for _, _, headers in superlink.calls:
        assert not {"trailer", "upgrade", "x-forwarded-for", "expect"} & {*headers}


def test_a_key_is_a_nodes_in_one_spelling_only(tmp_path: Path) -> None:
    """Else one node could have the connections and the patience of many."""

    async def visit(place: Place) -> None:
        async with place.node(ME) as node:
            place.superlink.waiting[ME] = [question(ME)]
            spelt = base64.b64encode(b"a text before it\n" + node.pem).decode()
            ask = fleet_pb2.PullMessagesRequest(node=node.proto())
            found = await node.call(
                "pull-messages", ask, **{fleet_api.PUBLIC_KEY: spelt}
            )
            assert found.status_code in (400, 401)
            assert (await node.pull()).messages_list

    visited(tmp_path, visit)


def test_who_pulls_an_object_over_and_over_slows_no_other(tmp_path: Path) -> None:
    """Over as many connections as a node may have, as fast as they are answered."""
    message = question(ME, size=1_200_000)

    async def visit(place: Place) -> None:
        async with place.node(ME) as node, place.node(OTHER) as other:
            place.superlink.waiting[ME] = [message]
            given = await node.pull()
            tree = given.message_object_trees[0]
            while tree.children:
                tree = tree.children[0]
            over = asyncio.Event()

            async def pull() -> None:
                while not over.is_set():
                    assert (await node.pull_object(tree.object_id)).status_code == 200

            pulls = [asyncio.create_task(pull()) for _ in range(8)]
            for _ in range(5):
                await other.pull()
            over.set()
            await asyncio.gather(*pulls)

    superlink = visited(tmp_path, visit)
    assert superlink.names().count("pull-object") == 1


def test_a_reset_in_the_midst_of_a_body_costs_nobody_else(tmp_path: Path) -> None:
    linger = struct.pack("ii", 1, 0)

    async def visit(place: Place) -> None:
        async with place.node(ME) as node, place.node(OTHER) as other:
            for _ in range(5):
                _, writer = await place.connect()
                writer.write(written(node, "push-object", bytes(2**20))[: 2**18])
                await writer.drain()
                plain = writer.get_extra_info("socket")
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()
            assert not (await other.pull()).messages_list
            assert not (await node.pull()).messages_list

    visited(tmp_path, visit)
