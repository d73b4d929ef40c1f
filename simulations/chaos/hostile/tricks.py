"""Attacks of a registered node on what puts messages together, and on patience."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
from google.protobuf.message import Message as Proto

from flwr_safedshb.flower.object_tree import hash_object, parse_head
from flwr_safedshb.node.flower_patches import fleet_api
from flwr_safedshb.node.flower_patches.fleet_api import (
    PackedMessage,
    fab_pb2,
    fleet_pb2,
    message_pb2,
    run_pb2,
)
from simulations.chaos.hostile.scene import Attack, Scene, counted
from simulations.chaos.hostile.speaker import told
from simulations.loopback.signing import sign_headers

_CHUNKS, _YEARS = 60_000, 1e300
_LINKS, _ODD, _VISITS = 12, 200, 5
HELD_SECONDS = 4.0


def crafted(pushed: PackedMessage, **changes: object) -> PackedMessage:
    """Return a reply whose array says something else of itself, up to the root."""
    parts = dict(pushed.objects)
    kinds = {name: parse_head(content).kind for name, content in parts.items()}
    (old,) = (name for name, kind in kinds.items() if kind == "Array")
    content = parts.pop(old)
    body = json.loads(content[parse_head(content).body :])
    content = _headed(content, json.dumps({**body, **changes}).encode())
    while True:
        new = hash_object(content)
        parts[new] = content
        above = [n for n, c in parts.items() if old in parse_head(c).children]
        if not above:
            break
        content = parts.pop(above[0]).replace(old.encode(), new.encode())
        content, old = _headed(content, content.partition(b"\0")[2]), above[0]
    message = message_pb2.Message()
    message.CopyFrom(pushed.message)
    message.metadata.message_id = new
    return PackedMessage(message, _tree(new, parts), parts)


def _headed(content: bytes, body: bytes) -> bytes:
    kind, children, _ = content.partition(b"\0")[0].split(b" ")
    return b" ".join([kind, children, str(len(body)).encode()]) + b"\0" + body


def _tree(root: str, parts: Mapping[str, bytes]) -> message_pb2.ObjectTree:
    children = [_tree(child, parts) for child in parse_head(parts[root]).children]
    return message_pb2.ObjectTree(object_id=root, children=children)


def send_bomb(scene: Scene) -> str:
    """Reply with an array that names one chunk 60,000 times."""
    return told(scene.node.send(crafted(scene.reply(), arraychunk_ids=[0] * _CHUNKS)))


def confirm_early(scene: Scene) -> str:
    """Say that the message has come while the server sends it, which deletes it."""
    confirm = message_pb2.ConfirmMessageReceivedRequest(
        node=scene.node.proto(),
        run_id=scene.asked.metadata.run_id,
        message_object_id=scene.asked.metadata.message_id,
    )
    return told(scene.node.call("confirm-message-received", confirm))


def bill_years(scene: Scene) -> str:
    """Say that the step took longer than the world is old, and at no time."""
    reply = scene.reply(created_at=float("nan"))
    request = fleet_pb2.PushMessagesRequest(
        node=scene.node.proto(),
        messages_list=[reply.message],
        message_object_trees=[reply.tree],
        clientapp_runtime_list=[_YEARS],
    )
    return told(scene.node.call("push-messages", request))


def read_nothing(scene: Scene) -> str:
    """Ask for the app over and over, and read none of the answers."""
    run_id = scene.asked.metadata.run_id
    run = run_pb2.GetRunRequest(node=scene.node.proto(), run_id=run_id)
    found = scene.node.call("get-run", run)
    name = run_pb2.GetRunResponse.FromString(found.content).run.fab_hash
    request = fab_pb2.GetFabRequest(
        node=scene.node.proto(), hash_str=name, run_id=run_id
    )
    until = time.monotonic() + HELD_SECONDS

    def ask(_: int) -> str:
        with suppress(OSError), _connected(scene) as link:
            link.settimeout(max(until - time.monotonic(), 0.1))
            while time.monotonic() < until:
                link.sendall(_written(scene, "get-fab", request))
        return "held, or cut off"

    with ThreadPoolExecutor(_LINKS) as pool:
        return counted(pool.map(ask, range(_LINKS)))


def _connected(scene: Scene) -> socket.socket:
    host, _, port = scene.node.address.rpartition(":")
    plain = socket.create_connection(
        (host, int(port)), timeout=HELD_SECONDS, source_address=scene.node.source
    )
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return scene.node.trusted.wrap_socket(plain, server_hostname=host)


def _written(scene: Scene, name: str, request: Proto) -> bytes:
    body = request.SerializeToString()
    headers = {"host": "gate", "content-length": str(len(body))}
    headers |= sign_headers(scene.node.key)
    lines = [f"POST /v1/fleet/{name} HTTP/1.1"]
    lines += [f"{key}: {value}" for key, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + bytes(body)


def send_nonsense(scene: Scene) -> str:
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
    for _ in range(_ODD):
        name = chance.choice([n for n in fleet_api.CALLS if n != "deactivate-node"])
        body = chance.choice([*bodies, chance.randbytes(chance.randrange(99))])
        found = scene.node.link.post(
            f"/v1/fleet/{name}", content=body, headers=sign_headers(scene.node.key)
        )
        said.append(str(found.status_code))
    return counted(said)


def come_and_go(scene: Scene) -> str:
    """Leave in the middle of the round, and come back, again and again."""
    said = []
    away = fleet_pb2.DeactivateNodeRequest(node_id=scene.node.number)
    for _ in range(_VISITS):
        said.append(told(scene.node.call("deactivate-node", away)))
        with suppress(httpx.HTTPStatusError):
            scene.node.activate()
            said.append("back")
    return counted(said)


TRICKS: tuple[Attack, ...] = (
    send_bomb,
    confirm_early,
    bill_years,
    read_nothing,
    send_nonsense,
    come_and_go,
)
