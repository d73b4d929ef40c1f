"""What one node has pulled, the SuperLink need not read again for the others."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from flwr_safedshb.flower.object_tree import hash_object
from flwr_safedshb.node.flower_patches.fleet_api import message_pb2
from flwr_safedshb.node.gate.object_cache import ObjectCache
from flwr_safedshb.node.gate.request import Response
from tests.node.gates import RUN, Place, question, visited


def answer(content: bytes) -> Response:
    found = message_pb2.PullObjectResponse(
        object_found=True, object_available=bool(content), object_content=content
    )
    return Response(200, found.SerializeToString())


class Asked:
    """A SuperLink that is slow, and counts."""

    def __init__(self, *answers: Response) -> None:
        self.answers, self.times = list(answers), 0

    async def __call__(self) -> Response:
        self.times += 1
        await asyncio.sleep(0.01)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


A = hash_object(b"a")

Fetch = Callable[[], Awaitable[Response]]


async def got(objects: ObjectCache, name: str, ask: Fetch) -> bytes:
    """Return the body of an object's response."""
    with ExitStack() as resources:
        return (await objects.get(name, resources, ask)).read_body()


def test_those_who_want_the_same_wait_for_the_one_who_asked(tmp_path: Path) -> None:
    objects, ask = ObjectCache(tmp_path, 100), Asked(answer(b"a"))

    async def together() -> list[bytes]:
        return await asyncio.gather(*(got(objects, A, ask) for _ in range(5)))

    assert asyncio.run(together()) == [answer(b"a").body] * 5
    assert ask.times == 1


@pytest.mark.parametrize("first", [answer(b""), Response(403)])
def test_what_is_not_there_yet_is_asked_for_again(
    first: Response, tmp_path: Path
) -> None:
    objects, ask = ObjectCache(tmp_path, 100), Asked(first, answer(b"a"))

    async def twice() -> list[bytes]:
        return [await got(objects, A, ask), await got(objects, A, ask)]

    assert asyncio.run(twice()) == [first.body, answer(b"a").body]


def test_who_asked_and_failed_does_not_stop_the_others(tmp_path: Path) -> None:
    objects, ask = ObjectCache(tmp_path, 100), Asked(answer(b"a"))

    async def fail() -> Response:
        await asyncio.sleep(0.01)
        raise OSError

    async def both() -> tuple[bytes | BaseException, bytes | BaseException]:
        return await asyncio.gather(
            got(objects, A, fail), got(objects, A, ask), return_exceptions=True
        )

    failed, found = asyncio.run(both())
    assert isinstance(failed, OSError)
    assert found == answer(b"a").body


def test_the_latest_are_kept_within_the_bytes_allowed(tmp_path: Path) -> None:
    contents = {letter: letter.encode() * 50 for letter in "abcd"}
    asks = {letter: Asked(answer(each)) for letter, each in contents.items()}
    most = 3 * answer(b"a" * 50).size

    async def pull(objects: ObjectCache, letters: str) -> None:
        for letter in letters:
            await got(objects, hash_object(contents[letter]), asks[letter])

    asyncio.run(pull(ObjectCache(tmp_path, most), "abcadab"))
    assert {letter: ask.times for letter, ask in asks.items()} == {
        **{"a": 1, "b": 2},
        **{"c": 1, "d": 1},
    }
    # Another gate finds them, and nothing that was not finished.
    (tmp_path / f".{A}").write_bytes(b"half")
    asyncio.run(pull(ObjectCache(tmp_path, most), "dab"))
    assert sum(ask.times for ask in asks.values()) == 5
    assert len([*tmp_path.iterdir()]) == 3


def test_only_who_was_given_a_message_gets_its_objects(tmp_path: Path) -> None:
    async def visit(place: Place) -> None:
        asked: list[Message] = [question(5), question(6)]
        place.superlink.waiting = {5: [asked[0]], 6: [asked[1]]}
        parts = [{*get_all_nested_objects(one)} for one in asked]
        shared = parts[0] & parts[1]
        assert shared
        async with place.node(5) as one, place.node(6) as two, place.node(7) as third:
            for node, names in ((one, parts[0]), (two, parts[1])):
                await node.pull()
                for name in sorted(names):
                    found = await node.pull_object(name)
                    got = message_pb2.PullObjectResponse.FromString(found.content)
                    assert got.object_content == place.superlink.objects[name]
            for name in shared:
                assert (await third.pull_object(name)).status_code == 404
        calls = place.superlink.names().count("pull-object")
        assert calls == len(parts[0] | parts[1])

    visited(tmp_path, visit)


def test_a_node_that_is_slow_to_read_keeps_no_object_from_the_others(
    tmp_path: Path,
) -> None:
    """The first to ask may have no room left for answers, or for calls."""

    async def visit(place: Place) -> None:
        asked: list[Message] = [question(5), question(6)]
        place.superlink.waiting = {5: [asked[0]], 6: [asked[1]]}
        parts = [{*get_all_nested_objects(one)} for one in asked]
        async with place.node(5) as hostile, place.node(6) as node:
            await hostile.pull()
            await node.pull()
            (stuck,) = (n for n in place.gate._known.values() if n.node_id == 5)
            for _ in range(place.gate.limits.node_calls):
                await stuck.calls.acquire()
            for name in parts[0] & parts[1]:
                place.superlink.delay = 0.1
                first = asyncio.create_task(hostile.pull_object(name))
                await asyncio.sleep(0.05)
                place.superlink.delay = 0.0
                assert (await node.pull_object(name)).status_code == 200
                await first

    visited(tmp_path, visit)


def test_objects_are_pulled_of_the_run_that_they_are_of(tmp_path: Path) -> None:
    """The SuperLink counts their bytes for the run that a call names."""

    async def visit(place: Place) -> None:
        message = question(5)
        place.superlink.waiting = {5: [message]}
        async with place.node(5) as node:
            await node.pull()
            request = message_pb2.PullObjectRequest(
                node=node.proto(), run_id=RUN + 1, object_id=message.object_id
            )
            assert (await node.call("pull-object", request)).status_code == 200

    (request,) = [r for n, r, _ in visited(tmp_path, visit).calls if n == "pull-object"]
    assert request.run_id == RUN
