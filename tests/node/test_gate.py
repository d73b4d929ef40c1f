"""The gate passes on what registered nodes call, and nothing else."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.superlink.routers.control.router import router as control
from flwr.superlink.routers.fleet.router import router as fleet_router

from flwr_safedshb.flower.object_tree import walk_tree
from flwr_safedshb.node.flower_patches import fleet_api
from flwr_safedshb.node.flower_patches.fleet_api import fleet_pb2
from flwr_safedshb.node.gate.backend import Backend
from flwr_safedshb.node.gate.limits import Limits
from tests.guard import HANGS
from tests.node.gates import (
    Node,
    Place,
    SuperLink,
    question,
    reply,
    sign_headers,
    visited,
)


def test_every_call_of_this_flower_is_known() -> None:
    inside = {"register-node", "unregister-node"}
    paths = {route.path for route in fleet_router.routes}  # type: ignore[attr-defined]
    assert paths == {f"/v1/fleet/{name}" for name in {*fleet_api.CALLS} | inside}
    for name, kind in fleet_api.CALLS.items():
        assert PROTOBUF_REQUEST_TYPES["POST", f"/v1/fleet/{name}"] is kind


def test_what_goes_inside_is_written_by_the_gate(tmp_path: Path) -> None:
    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            beat = fleet_api.CALLS["send-node-heartbeat"](
                node=node.proto(), heartbeat_interval=30
            )
            found = await node.call(
                "send-node-heartbeat",
                beat,
                **{"x-forwarded-for": "1.2.3.4", "cookie": "c", "host": "evil"},
            )
            assert found.status_code == 200
            assert "x-inside" not in found.headers

    superlink = visited(tmp_path, visit)
    name, request, headers = superlink.calls[-1]
    assert (name, fleet_api.claimed_node_id(request)) == ("send-node-heartbeat", 5)
    assert headers["host"] == "10.0.0.1:9091"
    assert not {"x-forwarded-for", "cookie"} & {*headers}
    assert {fleet_api.PUBLIC_KEY, fleet_api.SIGNATURE, fleet_api.TIMESTAMP} <= {
        *headers
    }


def test_no_words_of_a_node_reach_the_superlinks_log(tmp_path: Path) -> None:
    """It logs the hash of an app as it came, and versions from headers."""
    two_lines = "a" * 64 + "\n[Fleet] Activated node_id=1"

    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            for text in (two_lines, "\x1b[2J" + "a" * 60, "", "A" * 64):
                request = fleet_api.CALLS["get-fab"](node=node.proto(), hash_str=text)
                assert (await node.call("get-fab", request)).status_code == 400
            request = fleet_api.CALLS["get-fab"](node=node.proto(), hash_str="a" * 64)
            assert (await node.call("get-fab", request)).status_code == 200
            for value in ("\x1b[31m", "\xff"):
                reader, writer = await place.connect()
                lines = ["POST /v1/fleet/get-fab HTTP/1.1", "host: g"]
                lines += ["content-length: 0", f"flwr-package-version: {value}"]
                writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
                assert b" 400 " in await reader.readline()
                writer.close()

    superlink = visited(tmp_path, visit)
    assert superlink.names().count("get-fab") == 1


def test_operators_and_processes_do_not_get_through(tmp_path: Path) -> None:
    operators = [route.path for route in control.routes]  # type: ignore[attr-defined]
    closed = [*operators, "/v1/fleet/register-node", "/v1/fleet/unregister-node"]
    closed += ["/", "/docs", "/openapi.json", "/v1/runtime/acquire-task"]
    closed += ["/v1/fleet/../control/start-run", "/v1/fleet/pull-messages/x"]
    closed += ["/v1/fleet/..%2Fcontrol%2Fstart-run", "//v1/fleet/pull-messages"]
    closed += ["/v1/fleet/pull-messages?x=1", "http://other/v1/fleet/pull-messages"]

    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            for path in closed:
                reader, writer = await place.connect()
                lines = [f"POST {path} HTTP/1.1", "host: g", "content-length: 0"]
                lines += [f"{k}: {v}" for k, v in sign_headers(node.key).items()]
                writer.write("\r\n".join([*lines, "", ""]).encode())
                assert b" 404 " in await reader.readline(), path
                writer.close()
            found = await node.link.get("/v1/fleet/pull-messages")
            assert found.status_code in (405, 411)

    assert visited(tmp_path, visit).names() == ["activate-node"]


def forged_name(headers: dict[str, str]) -> None:
    headers[fleet_api.SIGNATURE] = headers[fleet_api.SIGNATURE][::-1]


@pytest.mark.parametrize(
    "change",
    [
        forged_name,
        lambda h: h.pop(fleet_api.SIGNATURE),
        lambda h: h.pop(fleet_api.PUBLIC_KEY),
        lambda h: h.update({fleet_api.PUBLIC_KEY: "x" * 5000}),
        lambda h: h.update({fleet_api.PUBLIC_KEY: "bm8ga2V5"}),
        lambda h: h.update({fleet_api.TIMESTAMP: "yesterday"}),
        lambda h: h.update({fleet_api.TIMESTAMP: datetime.now(UTC).isoformat()}),
    ],
)
def test_a_call_that_nobody_signed_costs_the_superlink_nothing(
    change: Callable[[dict[str, str]], None], tmp_path: Path
) -> None:
    async def visit(place: Place) -> None:
        async with place.node(5, registered=False) as node:
            headers = sign_headers(node.key)
            change(headers)
            found = await node.link.post(
                "/v1/fleet/pull-messages", content=b"", headers=headers
            )
            assert found.status_code == 401

    assert not visited(tmp_path, visit).calls


def test_an_old_signature_is_none(tmp_path: Path) -> None:
    async def visit(place: Place) -> None:
        async with place.node(5, registered=False) as node:
            for away in (-400, 60):
                when = datetime.now(UTC) + timedelta(seconds=away)
                found = await node.link.post(
                    "/v1/fleet/pull-messages",
                    content=b"",
                    headers=sign_headers(node.key, when),
                )
                assert found.status_code == 401

    assert not visited(tmp_path, visit).calls


async def asked(place: Place, node: Node) -> Any:
    """Give a node work, and let it fetch that."""
    message = question(node.number)
    place.superlink.waiting[node.number] = [message]
    given = await node.pull()
    assert len(given.messages_list) == 1
    for part, _ in walk_tree(given.message_object_trees[0]):
        assert (await node.pull_object(part.object_id)).status_code == 200
    return message


def test_a_reply_reaches_the_superlink_when_it_is_complete(tmp_path: Path) -> None:
    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            answer = reply(await asked(place, node))
            found = await node.announce(answer)
            assert found.status_code == 200, found.text
            told = fleet_pb2.PushMessagesResponse.FromString(found.content)
            parts = get_all_nested_objects(answer)
            assert {*told.objects_to_push} == {*parts}
            before = len(place.superlink.calls)
            *early, last = parts.items()
            for name, part in early:
                done = await node.push_object(told.session_id, name, part.deflate())
                assert done.status_code == 200, done.text
            assert len(place.superlink.calls) == before
            name, part = last
            done = await node.push_object(told.session_id, name, part.deflate())
            assert done.status_code == 200, done.text
            for name, part in parts.items():
                assert place.superlink.objects[name] == part.deflate()
            pushed = place.superlink.names()[before:]
            assert pushed == ["push-messages", *["push-object"] * len(parts)]
            # One reply a message.
            assert (await node.announce(answer)).status_code == 400

    visited(tmp_path, visit)


def test_work_is_handed_out_as_soon_as_there_is_some(tmp_path: Path) -> None:
    limits = Limits(hold_seconds=30.0, poll_seconds=0.02)

    async def visit(place: Place) -> None:
        async with place.node(5) as node, place.node(6) as other:
            held = asyncio.create_task(node.pull())
            await asyncio.sleep(0.1)
            assert not held.done()
            place.superlink.waiting[5] = [question(5)]
            place.superlink.waiting[6] = [question(6)]
            assert len((await held).messages_list) == 1
            assert len((await other.pull()).messages_list) == 1

    visited(tmp_path, visit, limits)


def test_many_who_wait_ask_no_more_often_than_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[float | None] = []
    timeout = asyncio.timeout

    def noted(seconds: float | None) -> asyncio.Timeout:
        waited.append(seconds)
        return timeout(seconds)

    monkeypatch.setattr(asyncio, "timeout", noted)
    backend = Backend.__new__(Backend)
    backend.limits = Limits(poll_seconds=9.0)
    backend._has_work, backend._num_waiting = asyncio.Event(), 0

    async def wait() -> None:
        together = [asyncio.create_task(backend.wait_for_work()) for _ in range(12)]
        await asyncio.sleep(0)
        backend.announce_work()
        async with timeout(HANGS):
            await asyncio.gather(*together)

    asyncio.run(wait())
    assert waited == [9.0 * min(number, 10) for number in range(1, 13)]
    assert backend._num_waiting == 0


def test_a_call_for_work_ends_when_there_is_none(tmp_path: Path) -> None:
    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            assert not (await node.pull()).messages_list

    assert visited(tmp_path, visit).names().count("pull-messages") > 1


def test_a_node_that_floods_slows_itself(tmp_path: Path) -> None:
    superlink = SuperLink(delay=0.02)
    limits = Limits(node_calls=3)

    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            beat = fleet_api.CALLS["send-node-heartbeat"](
                node=node.proto(), heartbeat_interval=30
            )
            superlink.most_under_way = 0
            flood = [node.call("send-node-heartbeat", beat) for _ in range(40)]
            answers = await asyncio.gather(*flood, return_exceptions=True)
            ok = [a for a in answers if isinstance(a, httpx.Response)]
            assert {a.status_code for a in ok} <= {200, 503}
            assert superlink.most_under_way <= 3

    visited(tmp_path, visit, limits, superlink)


def test_a_superlink_that_is_down_is_said_to_be(tmp_path: Path) -> None:
    class Down(SuperLink):
        async def __call__(self, request: httpx.Request) -> httpx.Response:
            raise httpx.ConnectError("refused")

    async def visit(place: Place) -> None:
        async with place.node(5, registered=False) as node:
            assert (await node.activate()).status_code == 502

    visited(tmp_path, visit, superlink=Down())


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="body_bytes=0"):
        Limits(body_bytes=0)


def test_an_error_of_the_gate_ends_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def visit(place: Place) -> None:
        async with place.node(5) as node:
            beat = fleet_api.CALLS["send-node-heartbeat"](
                node=node.proto(), heartbeat_interval=30
            )
            with monkeypatch.context() as patched:
                patched.setattr(fleet_api, "claimed_node_id", lambda request: 1 / 0)
                found = await node.call("send-node-heartbeat", beat)
                assert found.status_code == 500
            found = await node.call("send-node-heartbeat", beat)
            assert found.status_code == 200
            assert place.gate.refusals["ZeroDivisionError within the gate"] == 1

    visited(tmp_path, visit)
