"""Replies that are more than they seem, or that the SuperLink cannot take at once."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict
from flwr.app.message import array as flower_array
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from google.protobuf import wrappers_pb2

from flwr_safedshb.flower.compat import set_process_run
from flwr_safedshb.flower.object_tree import walk_tree
from flwr_safedshb.node.flower_patches.fleet_api import (
    PackedMessage,
    fleet_pb2,
    pack_message,
)
from flwr_safedshb.node.gate.backend import encode_varint
from flwr_safedshb.node.gate.limits import Limits
from flwr_safedshb.node.gate.message_size import measure_message, measure_object
from simulations.chaos.hostile.attacks import change_array
from tests.guard import HANGS
from tests.node.gates import (
    RUN,
    Node,
    Place,
    SuperLink,
    question,
    reply,
    visited,
)
from tests.node.test_gate import asked


async def sent(node: Node, pushed: PackedMessage) -> httpx.Response:
    """Announce a reply and push its objects; return the first refusal, or the end."""
    request = fleet_pb2.PushMessagesRequest(
        node=node.proto(),
        messages_list=[pushed.message],
        message_object_trees=[pushed.tree],
    )
    found = await node.call("push-messages", request)
    if found.status_code >= 400:
        return found
    told = fleet_pb2.PushMessagesResponse.FromString(found.content)
    for name in told.objects_to_push:
        found = await node.push_object(told.session_id, name, pushed.objects[name])
        if found.status_code >= 400:
            return found
    return found


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"arraychunk_ids": [0] * 60_000}, 413),  # 10 kB that become 600 MB
        ({"arraychunk_ids": [7]}, 400),
        ({"arraychunk_ids": "0"}, 400),
        ({"arraychunk_ids": None}, 400),
        ({"arraychunk_ids": [0]}, 200),
    ],
    ids=["bomb", "absent", "text", "none", "honest"],
)
def test_a_reply_is_measured_by_what_it_becomes(
    changes: dict[str, object], status: int, tmp_path: Path
) -> None:
    """The server puts a reply together before anything of ours sees it."""

    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            answer = reply(await asked(place, node), size=2500)
            found = await sent(node, change_array(pack_message(answer), **changes))
            assert found.status_code == status, found.text
            reached = "push-messages" in place.superlink.names()
            assert reached == (status == 200)

    visited(tmp_path, visit)


def test_a_message_is_as_large_as_flower_makes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flower_array, "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", 400)
    values = [np.zeros(1000, np.float32), np.arange(300, dtype=np.float32)]
    record = ArrayRecord(values)
    parts = get_all_nested_objects(record)
    sizes = measure_message({n: measure_object(p.deflate()) for n, p in parts.items()})
    inside = sum(len(array.data) for array in record.values())
    assert inside <= sizes.array_bytes <= inside * 1.1
    # The zeros are there once, and count as often as they are in the array.
    assert sum(len(p.deflate()) for p in parts.values()) < inside / 1.5


def test_noise_may_answer_zeros(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Chunks that are alike travel once; the momentum that answers them does not."""
    monkeypatch.setattr(flower_array, "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", 4000)
    limits = Limits(hold_seconds=0.05, poll_seconds=0.01, reply_bytes=2000)
    set_process_run(RUN)
    zeros = {f"w{i}": Array(np.zeros(1000, np.float32)) for i in range(20)}
    noise = {f"w{i}": Array(np.full(1000, i, np.float32)) for i in range(20)}

    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            content = RecordDict({"arrays": ArrayRecord(zeros)})
            message = Message(content, 5, "train", ttl=60.0)
            message.metadata.__dict__["_message_id"] = message.object_id
            place.superlink.waiting[5] = [message]
            given = await node.pull()
            for part, _ in walk_tree(given.message_object_trees[0]):
                await node.pull_object(part.object_id)
            answer = Message(
                RecordDict({"arrays": ArrayRecord(noise)}), reply_to=message
            )
            answer.metadata.__dict__["_message_id"] = answer.object_id
            found = await sent(node, pack_message(answer))
            assert found.status_code == 200, found.text

    visited(tmp_path, visit, limits)


def test_to_ask_again_allows_no_larger_reply(tmp_path: Path) -> None:
    limits = Limits(hold_seconds=0.05, poll_seconds=0.01, reply_bytes=1000)

    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            message = await asked(place, node)
            for _ in range(40):
                for name in get_all_nested_objects(message):
                    await node.pull_object(name)
            found = await sent(node, pack_message(reply(message, size=2000)))
            assert found.status_code == 413

    visited(tmp_path, visit, limits)


@pytest.mark.parametrize(
    "change",
    [
        lambda about: about.__setattr__("created_at", float("nan")),
        lambda about: about.__setattr__("ttl", float("inf")),
    ],
)
def test_times_are_numbers(change: Callable[[Any], None], tmp_path: Path) -> None:
    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            answer = reply(await asked(place, node))
            found = await node.announce(
                answer, lambda request: change(request.messages_list[0].metadata)
            )
            assert found.status_code == 400

    assert "push-messages" not in visited(tmp_path, visit).names()


def test_nobody_bills_a_run_for_years(tmp_path: Path) -> None:
    def years(request: Any) -> None:
        request.clientapp_runtime_list[0] = 1e300

    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            answer = reply(await asked(place, node))
            found = await node.announce(answer, years)
            told = fleet_pb2.PushMessagesResponse.FromString(found.content)
            for name, part in get_all_nested_objects(answer).items():
                await node.push_object(told.session_id, name, part.deflate())

    superlink = visited(tmp_path, visit)
    (request,) = [r for n, r, _ in superlink.calls if n == "push-messages"]
    assert request.clientapp_runtime_list[0] < 60.0


def test_an_error_is_the_same_inside(tmp_path: Path) -> None:
    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            answer = Message(Error(0, "tired"), reply_to=await asked(place, node))
            answer.metadata.__dict__["_message_id"] = answer.object_id

            def other(request: Any) -> None:
                request.messages_list[0].error.reason = "something else"

            found = await node.announce(answer, other)
            told = fleet_pb2.PushMessagesResponse.FromString(found.content)
            root = answer.metadata.message_id
            done = await node.push_object(told.session_id, root, answer.deflate())
            assert done.status_code == 400

    assert "push-messages" not in visited(tmp_path, visit).names()


class Failing(SuperLink):
    """A SuperLink that fails over a call so many times."""

    failing = ""
    times = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        answer = await super().__call__(request)
        if request.url.path.endswith(self.failing) and self.times:
            self.times -= 1
            return httpx.Response(500)
        return answer


@pytest.mark.parametrize("call", ["push-messages", "push-object"])
@pytest.mark.parametrize(("times", "last"), [(2, 200), (9, 500)])
def test_what_the_superlink_fails_over_may_be_pushed_again(
    call: str, times: int, last: int, tmp_path: Path
) -> None:
    """A node that has paid for its reply sends the same bytes, a few times."""
    superlink = Failing()

    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            answer = reply(await asked(place, node))
            superlink.failing, superlink.times = call, times
            found = await node.announce(answer)
            told = fleet_pb2.PushMessagesResponse.FromString(found.content)
            parts = get_all_nested_objects(answer)
            statuses = []
            for name, part in parts.items():
                statuses.append(503)
                while statuses[-1] == 503:  # as Flower's SuperNode does
                    done = await node.push_object(told.session_id, name, part.deflate())
                    statuses.append(done.status_code)
            assert statuses[-1] == last
            if last == 200:
                for name, part in parts.items():
                    assert superlink.objects[name] == part.deflate()
                # And again, for an answer that was lost on its way.
                done = await node.push_object(told.session_id, name, part.deflate())
                assert done.status_code == 200

    names = visited(tmp_path, visit, superlink=superlink).names()
    if call == "push-messages":
        assert names.count(call) == min(times, 3) + 1


def test_a_reply_that_is_passed_on_is_not_replaced(tmp_path: Path) -> None:
    superlink = SuperLink(delay=0.05)

    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            answer = reply(await asked(place, node))
            found = await node.announce(answer)
            told = fleet_pb2.PushMessagesResponse.FromString(found.content)
            *early, (name, last) = get_all_nested_objects(answer).items()
            for other, part in early:
                await node.push_object(told.session_id, other, part.deflate())
            delivery = asyncio.create_task(
                node.push_object(told.session_id, name, last.deflate())
            )
            while "push-messages" not in superlink.names():
                await asyncio.sleep(0.01)
            again = await node.announce(answer)
            assert 400 <= again.status_code < 600
            assert (await delivery).status_code == 200
            assert place.superlink.objects[name] == last.deflate()

    visited(tmp_path, visit, superlink=superlink)
    assert superlink.names().count("push-messages") == 1


def test_a_node_waits_for_work_once(tmp_path: Path) -> None:
    """Held calls ask the SuperLink again and again; those of one node as one."""
    limits = Limits(hold_seconds=HANGS, poll_seconds=0.02)

    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            first = asyncio.create_task(node.pull())
            while "pull-messages" not in place.superlink.names():
                await asyncio.sleep(0.01)
            second = asyncio.create_task(node.pull())
            assert not (await first).messages_list
            place.superlink.waiting[5] = [question(5)]
            assert len((await second).messages_list) == 1

    visited(tmp_path, visit, limits)


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**20, 2**35 + 7])
def test_numbers_are_written_as_protobuf_does(number: int) -> None:
    """Objects are streamed behind such a number and never serialized."""
    written = wrappers_pb2.UInt64Value(value=number).SerializeToString()
    assert encode_varint(number) == (written[1:] or b"\0")
