"""Flower's own SuperNode speaks through the gate, and finds nothing missing."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatResponse
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
)
from flwr.supercore.retry import http_retry
from flwr.supernode.fleet_http_connection import http_request_response
from google.protobuf.message import Message as Proto

from flwr_safedshb.flower.compat import set_process_run
from flwr_safedshb.flower.object_tree import walk_tree
from flwr_safedshb.node.flower_patches import fleet_api
from flwr_safedshb.node.gate.handlers import NodeSession
from flwr_safedshb.node.gate.request import Request, Response
from simulations.loopback.signing import Key, public_key_pem
from tests.node.gates import RUN, Place, SuperLink, visited

ME = 5
# Three chunks of Flower's in one array, and none in the others.
SHAPES = {"large": (3_000_000,), "small": (4, 3), "empty": (0,)}


class Beating(SuperLink):
    """A SuperLink that also answers heartbeats."""

    def _answer(self, asked: Proto, node: int) -> Proto:
        if isinstance(asked, fleet_api.CALLS["send-node-heartbeat"]):
            return SendNodeHeartbeatResponse(success=True)
        return super()._answer(asked, node)


def content(seed: int) -> RecordDict:
    rng = np.random.default_rng(seed)
    arrays = {n: rng.standard_normal(s, np.float32) for n, s in SHAPES.items()}
    return RecordDict({"arrays": ArrayRecord({n: Array(a) for n, a in arrays.items()})})


def served(place: Place, key: Key, trusted: bytes) -> Message:
    """Take one message and answer it, as Flower's SuperNode does."""
    with http_request_response(
        f"127.0.0.1:{place.port}",
        insecure=False,
        root_certificates=trusted,
        authentication_keys=(key, key.public_key()),
    ) as (number, receive, send, _, _, pull, push, confirm):
        assert number == ME
        given = receive()
        assert given is not None
        message, tree = given
        for part, _ in walk_tree(tree):
            found = pull(RUN, part.object_id)
            assert found == place.superlink.objects[part.object_id]
        confirm(RUN, message.metadata.message_id)
        answer = Message(content(1), reply_to=message)
        answer.metadata.__dict__["_message_id"] = answer.object_id
        names, session = send(answer, get_object_tree(answer), 0.25)
        parts = get_all_nested_objects(answer)
        assert names == {*parts}
        for name, sent in parts.items():
            push(RUN, session, name, sent.deflate())
        return answer


def asking(key: Key) -> Beating:
    """Return a SuperLink with a message for the node that has this key."""
    superlink = Beating()
    superlink.nodes[public_key_pem(key)] = ME
    set_process_run(RUN)
    message = Message(content(0), ME, "train", ttl=60.0)
    message.metadata.__dict__["_message_id"] = message.object_id
    superlink.waiting[ME] = [message]
    return superlink


def test_it_takes_a_message_and_its_reply_arrives_whole(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    superlink = asking(key)

    async def visit(place: Place) -> None:
        trusted = (tmp_path / "gate.crt").read_bytes()
        answer = await asyncio.to_thread(served, place, key, trusted)
        for name, part in get_all_nested_objects(answer).items():
            assert superlink.objects[name] == part.deflate()
        assert not place.gate.refusals

    visited(tmp_path, visit, superlink=superlink)
    assert superlink.names().count("confirm-message-received") == 1
    (pushed,) = [r for n, r, _ in superlink.calls if n == "push-messages"]
    assert pushed.clientapp_runtime_list[0] <= 0.25


def test_no_reply_is_lost_with_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a node has paid for arrives, whenever the gate hangs up on it."""
    # Flower waits a second and longer before it tries again.
    monkeypatch.setattr(http_retry, "MAX_RETRY_DELAY", 0.05)
    key = ec.generate_private_key(ec.SECP384R1())
    superlink = asking(key)
    hung_up: set[tuple[str, str]] = set()

    async def visit(place: Place) -> None:
        answered = place.gate.handle_request

        async def hang_up(request: Request, session: NodeSession) -> Response:
            name = request.path.rpartition("/")[2]
            for when in ("before", "after"):
                answer = await answered(request, session) if when == "after" else None
                if (name, when) not in hung_up:
                    hung_up.add((name, when))
                    place.cut(request)
                    raise EOFError
            assert answer is not None
            return answer

        monkeypatch.setattr(place.gate, "handle_request", hang_up)
        trusted = (tmp_path / "gate.crt").read_bytes()
        answer = await asyncio.to_thread(served, place, key, trusted)
        for name, part in get_all_nested_objects(answer).items():
            assert superlink.objects[name] == part.deflate()

    visited(tmp_path, visit, superlink=superlink)
    calls = ["pull-messages", "pull-object", "confirm-message-received"]
    calls += ["push-messages", "push-object"]
    assert {(name, when) for name in calls for when in ("before", "after")} <= hung_up
    assert superlink.names().count("push-messages") == 1
