"""What a registered node can try in a round; its docstrings are printed."""

from __future__ import annotations

import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from google.protobuf.message import Message as Proto

from flwr_safedshb.flower.object_tree import hash_object, parse_head, walk_tree
from flwr_safedshb.node.flower_patches import fleet_api
from flwr_safedshb.node.flower_patches.fleet_api import (
    PackedMessage,
    fab_pb2,
    fleet_pb2,
    message_pb2,
    pack_message,
    run_pb2,
)
from simulations.chaos.hostile.node import FleetNode, objects_to_push
from simulations.chaos.problem import DIMENSION, EXAMPLES
from simulations.chaos.trace import read_messages
from simulations.loopback.signing import sign_headers

SERVER = fleet_api.SUPERLINK
CONNECTIONS, HELD_SECONDS = 200, 4.0
_OBJECTS, _CALLS, _CHUNKS, _YEARS = 3_002, 300, 60_000, 1e300
_LINKS, _NONSENSE, _VISITS = 12, 200, 5


@dataclass(frozen=True)
class Scene:
    """One round: the node, what it was asked, and what it knows of others."""

    node: FleetNode
    asked: Message
    others: list[int]
    trace: Path

    @property
    def run_id(self) -> int:
        """The run that the message is of."""
        return self.asked.metadata.run_id

    def make_reply(self, value: float = 1.0, **changes: object) -> PackedMessage:
        """Return a reply with the vector of an adversary."""
        vector = np.full((DIMENSION, 1), value, np.float32)
        content = RecordDict(
            {
                "arrays": ArrayRecord({"weight": Array(vector)}),
                "metrics": MetricRecord({"num-examples": EXAMPLES}),
            }
        )
        return pack_message(Message(content, reply_to=self.asked), **changes)

    def message_of_another(self) -> str:
        """Return the id of the message that another node was sent, once it was."""
        until = time.monotonic() + 2.0
        names: list[str] = []
        while not names and time.monotonic() < until:
            sent, _ = read_messages(self.trace)
            names = [m.id for m in sent if m.node == self.others[0]][-1:]
        return names[0] if names else "0" * 64


Answer = httpx.Response | list[httpx.Response] | str
Attack = Callable[[Scene], Answer]


def describe_answer(answer: Answer) -> str:
    """Return what the gate says, in words."""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, list):
        return ", then ".join(map(describe_answer, answer))
    words = answer.text if answer.status_code >= 400 else "accepted"
    return f"{answer.status_code} {words}"


def count_words(words: Iterable[str]) -> str:
    """Return words with how often each was said."""
    return ", ".join(f"{n} x {word}" for word, n in Counter(words).most_common())


def be_silent(scene: Scene) -> Answer:
    """Do nothing but fail, for comparison."""
    return "nothing tried"


def instruct_server(scene: Scene) -> Answer:
    """Write to the server in the server's name, which Flower takes for a question."""
    forged = scene.make_reply(
        reply_to_message_id="", src_node_id=SERVER, dst_node_id=SERVER
    )
    return scene.node.announce_push(forged)


def instruct_node(scene: Scene) -> Answer:
    """Ask another node for a step in the server's name."""
    other = scene.others[0]
    forged = scene.make_reply(
        reply_to_message_id="", src_node_id=SERVER, dst_node_id=other
    )
    return scene.node.announce_push(forged)


def borrow_name(scene: Scene) -> Answer:
    """Reply in the name of another node."""
    other = scene.others[0]
    return scene.node.announce_push(scene.make_reply(src_node_id=other), number=other)


def answer_for_another(scene: Scene) -> Answer:
    """Answer the message of another node, whose id somebody has told it."""
    other = scene.message_of_another()
    return scene.node.announce_push(scene.make_reply(reply_to_message_id=other))


def poison_record(scene: Scene) -> Answer:
    """Register a record that honest nodes might send, with children it has not."""
    reply = scene.make_reply()
    metrics = next(n for n, c in reply.objects.items() if c.startswith(b"Metric"))
    for part, _ in walk_tree(reply.tree):
        if part.object_id == metrics:
            part.children.add().object_id = "f" * 64
    reply.objects["f" * 64] = b"never"
    return scene.node.push_message(reply)


def withhold(scene: Scene) -> Answer:
    """Announce a reply, and let most of it never come."""
    reply = scene.make_reply()
    announced = scene.node.announce_push(reply)
    name = objects_to_push(announced)[0]
    scene.node.push_object(announced, scene.run_id, name, reply.objects[name])
    time.sleep(HELD_SECONDS)
    return (
        f"{describe_answer(announced)}, and {len(reply.objects) - 1} objects never come"
    )


def send_many_objects(scene: Scene) -> Answer:
    """Reply with thousands of records."""
    content = RecordDict()
    for i in range(_OBJECTS - 2):
        content[str(i)] = MetricRecord({"i": i})
    return scene.node.announce_push(
        pack_message(Message(content, reply_to=scene.asked))
    )


def open_connections(scene: Scene) -> Answer:
    """Ask for work over hundreds of connections at once."""
    request = fleet_pb2.PullMessagesRequest(node=scene.node.make_proto())
    until = time.monotonic() + HELD_SECONDS

    def ask(_: int) -> str:
        try:
            with scene.node.open_link() as link:
                link.timeout = httpx.Timeout(max(until - time.monotonic(), 0.1))
                return describe_answer(scene.node.call("pull-messages", request, link))
        except httpx.TimeoutException:
            return "held"
        except httpx.HTTPError as error:
            return type(error).__name__

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return count_words(pool.map(ask, range(CONNECTIONS)))


def flood_gate(scene: Scene) -> Answer:
    """Call as often as it can, over several connections."""

    def call(_: int) -> str:
        with suppress(httpx.HTTPError), scene.node.open_link() as link:
            beats = (scene.node.send_heartbeat(link) for _ in range(_CALLS // 10))
            return count_words(map(describe_answer, beats))
        return "cut off"

    with ThreadPoolExecutor(10) as pool:
        return count_words(pool.map(call, range(10)))


def reply_twice(scene: Scene) -> Answer:
    """Fail, and then reply all the same, twice."""
    failed = scene.node.send_failure(scene.asked)
    return [
        failed,
        *(scene.node.push_message(scene.make_reply(value)) for value in (2.0, 3.0)),
    ]


def push_two(scene: Scene) -> Answer:
    """Push a surplus message with the first."""
    return scene.node.announce_push(scene.make_reply(4.0), scene.make_reply(5.0))


def push_too_much(scene: Scene) -> Answer:
    """Push an object that is larger than the model."""
    announced = scene.node.announce_push(scene.make_reply())
    name = objects_to_push(announced)[0]
    return scene.node.push_object(announced, scene.run_id, name, bytes(15 * 2**20))


def read_anothers(scene: Scene) -> Answer:
    """Ask for what another node was sent, and say that it has come."""
    other, node = scene.message_of_another(), scene.node.make_proto()
    pull = message_pb2.PullObjectRequest(
        node=node, run_id=scene.run_id, object_id=other
    )
    confirm = message_pb2.ConfirmMessageReceivedRequest(
        node=node, run_id=scene.run_id, message_object_id=other
    )
    return [
        scene.node.call("pull-object", pull),
        scene.node.call("confirm-message-received", confirm),
    ]


def send_away(scene: Scene) -> Answer:
    """Say that another node leaves."""
    request = fleet_pb2.DeactivateNodeRequest(node_id=scene.others[0])
    return scene.node.call("deactivate-node", request)


def send_bomb(scene: Scene) -> Answer:
    """Reply with an array that names one chunk 60,000 times."""
    return scene.node.push_message(
        change_array(scene.make_reply(), arraychunk_ids=[0] * _CHUNKS)
    )


def confirm_early(scene: Scene) -> Answer:
    """Say that the message has come while the server sends it, which deletes it."""
    confirm = message_pb2.ConfirmMessageReceivedRequest(
        node=scene.node.make_proto(),
        run_id=scene.run_id,
        message_object_id=scene.asked.metadata.message_id,
    )
    return scene.node.call("confirm-message-received", confirm)


def bill_years(scene: Scene) -> Answer:
    """Say that the step took longer than the world is old, and at no time."""
    return scene.node.announce_push(
        scene.make_reply(created_at=float("nan")), seconds=_YEARS
    )


def read_nothing(scene: Scene) -> Answer:
    """Ask for the app over and over, and read none of the answers."""
    node = scene.node
    run = run_pb2.GetRunRequest(node=node.make_proto(), run_id=scene.run_id)
    response = node.call("get-run", run)
    name = run_pb2.GetRunResponse.FromString(response.content).run.fab_hash
    request = fab_pb2.GetFabRequest(
        node=node.make_proto(), hash_str=name, run_id=scene.run_id
    )
    until = time.monotonic() + HELD_SECONDS
    host, _, port = node.address.rpartition(":")

    def ask(_: int) -> str:
        with suppress(OSError):
            plain = socket.create_connection(
                (host, int(port)), timeout=HELD_SECONDS, source_address=node.source
            )
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            with node.trusted.wrap_socket(plain, server_hostname=host) as link:
                link.settimeout(max(until - time.monotonic(), 0.1))
                while time.monotonic() < until:
                    link.sendall(_write_call(scene, "get-fab", request))
        return "held, or cut off"

    with ThreadPoolExecutor(_LINKS) as pool:
        return count_words(pool.map(ask, range(_LINKS)))


def _write_call(scene: Scene, name: str, request: Proto) -> bytes:
    body = request.SerializeToString()
    headers = {"host": "gate", "content-length": str(len(body))}
    headers |= sign_headers(scene.node.key)
    lines = [f"POST /v1/fleet/{name} HTTP/1.1"]
    lines += [f"{key}: {value}" for key, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + bytes(body)


def pad_calls(scene: Scene) -> Answer:
    """Pad calls for work to 100 KiB with a field that nobody knows, and hold them."""
    request = fleet_pb2.PullMessagesRequest(node=scene.node.make_proto())
    padding = b"\xfa\x3f\x80\xa0\x06" + bytes(100 * 2**10)  # field 1023, its length
    body = request.SerializeToString() + padding
    until = time.monotonic() + HELD_SECONDS

    def ask(_: int) -> str:
        try:
            with scene.node.open_link() as link:
                link.timeout = httpx.Timeout(max(until - time.monotonic(), 0.1))
                return describe_answer(scene.node.call("pull-messages", body, link))
        except httpx.TimeoutException:
            return "held"
        except httpx.HTTPError as error:
            return type(error).__name__

    with ThreadPoolExecutor(_LINKS) as pool:
        return count_words(pool.map(ask, range(_LINKS)))


def send_nonsense(scene: Scene) -> Answer:
    """Send bytes that are no request, or almost one, to every call."""
    chance = random.Random(1)
    bodies = [
        b"\xff" * 11,  # a number that does not end
        b"\x0a\xff\xff\xff\xff\x0f",  # more bytes than there are
        b"\x0a\x00" * 3000,  # the same field again and again
        b"\xf8\xff\xff\xff\x0f\x00",  # a field that nobody knows
        b"\x12\x80\x80\x01" + b"\x12\x02" * 8192,  # one inside the other
    ]
    said = []
    for _ in range(_NONSENSE):
        name = chance.choice([n for n in fleet_api.CALLS if n != "deactivate-node"])
        body = chance.choice([*bodies, chance.randbytes(chance.randrange(99))])
        said.append(str(scene.node.call(name, body).status_code))
    return count_words(said)


def come_and_go(scene: Scene) -> Answer:
    """Leave in the middle of the round, and come back, again and again."""
    said = []
    away = fleet_pb2.DeactivateNodeRequest(node_id=scene.node.number)
    for _ in range(_VISITS):
        said.append(describe_answer(scene.node.call("deactivate-node", away)))
        with suppress(httpx.HTTPStatusError):
            scene.node.activate_node()
            said.append("back")
    return count_words(said)


ATTACKS: dict[str, Attack] = {
    attack.__name__.replace("_", "-"): attack
    for attack in (
        *(be_silent, instruct_server, instruct_node, borrow_name, answer_for_another),
        *(
            poison_record,
            withhold,
            send_many_objects,
            open_connections,
            flood_gate,
            reply_twice,
        ),
        *(push_two, push_too_much, read_anothers, send_away, send_bomb, confirm_early),
        *(bill_years, read_nothing, pad_calls, send_nonsense, come_and_go),
    )
}


# ---- replies with another array than Flower would make -----------------------------


def change_array(pushed: PackedMessage, **changes: object) -> PackedMessage:
    """Return a reply whose array says something else of itself, up to the root."""
    parts = dict(pushed.objects)
    kinds = {name: parse_head(content).kind for name, content in parts.items()}
    (old,) = (name for name, kind in kinds.items() if kind == "Array")
    content = parts.pop(old)
    body = json.loads(content[parse_head(content).body :])
    content = _replace_body(content, json.dumps({**body, **changes}).encode())
    while True:
        new = hash_object(content)
        parts[new] = content
        above = [n for n, c in parts.items() if old in parse_head(c).children]
        if not above:
            break
        content = parts.pop(above[0]).replace(old.encode(), new.encode())
        content, old = _replace_body(content, content.partition(b"\0")[2]), above[0]
    message = message_pb2.Message()
    message.CopyFrom(pushed.message)
    message.metadata.message_id = new
    return PackedMessage(message, _make_tree(new, parts), parts)


def _replace_body(content: bytes, body: bytes) -> bytes:
    kind, children, _ = content.partition(b"\0")[0].split(b" ")
    return b" ".join([kind, children, str(len(body)).encode()]) + b"\0" + body


def _make_tree(root: str, parts: Mapping[str, bytes]) -> message_pb2.ObjectTree:
    children = [_make_tree(child, parts) for child in parse_head(parts[root]).children]
    return message_pb2.ObjectTree(object_id=root, children=children)
