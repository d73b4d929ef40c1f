"""A registered node that attacks in every round, and then fails as a crashed one does.

Run by the suite: ``python -m simulations.chaos.hostile.insider SETTINGS.json``. It
writes down what the gate answered, attack by attack.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from flwr.app import Message, MetricRecord, RecordDict

from flwr_safedshb.flower.object_tree import walk_tree
from flwr_safedshb.node.flower_patches import fleet_api
from flwr_safedshb.node.flower_patches.fleet_api import (
    fleet_pb2,
    message_pb2,
    pack_message,
)
from simulations.chaos.hostile.scene import Attack, Scene, counted
from simulations.chaos.hostile.speaker import HEARTBEAT_SECONDS, Speaker, told
from simulations.chaos.hostile.tricks import TRICKS
from simulations.chaos.trace import note, noted_messages

SERVER = fleet_api.SUPERLINK
_CONNECTIONS, _OBJECTS, _CALLS = 200, 3_002, 300
_HELD_SECONDS = 4.0
# Not that of the honest nodes, on whose machines it is not.
ADDRESS = "127.0.0.10"


@dataclass(frozen=True)
class Settings:
    """Where the insider is, who it is, and what else it may know."""

    address: str
    trusted: str
    key: str
    number: int
    others: list[int]
    trace: str
    output: str
    attacks: list[str]  # by round; several in one are joined by +


def instruct_server(scene: Scene) -> str:
    """Write to the server in the server's name, which Flower takes for a question."""
    forged = scene.reply(reply_to_message_id="", src_node_id=SERVER, dst_node_id=SERVER)
    return told(scene.node.announce(forged))


def instruct_node(scene: Scene) -> str:
    """Ask another node for a step in the server's name."""
    forged = scene.reply(
        reply_to_message_id="", src_node_id=SERVER, dst_node_id=scene.others[0]
    )
    return told(scene.node.announce(forged))


def borrow_name(scene: Scene) -> str:
    """Reply in the name of another node."""
    other = scene.others[0]
    return told(scene.node.announce(scene.reply(src_node_id=other), number=other))


def answer_for_another(scene: Scene) -> str:
    """Response the message of another node, whose id somebody has told it."""
    until = time.monotonic() + 2.0
    names: list[str] = []
    while not names and time.monotonic() < until:
        sent, _ = noted_messages(scene.trace)
        names = [m.id for m in sent if m.node == scene.others[0]][-1:]
    forged = scene.reply(reply_to_message_id=names[0] if names else "0" * 64)
    return told(scene.node.announce(forged))


def poison(scene: Scene) -> str:
    """Register a record that honest nodes might send, with children it has not."""
    reply = scene.reply()
    metrics = next(n for n, c in reply.objects.items() if c.startswith(b"Metric"))
    for part, _ in walk_tree(reply.tree):
        if part.object_id == metrics:
            part.children.add().object_id = "f" * 64
    reply.objects["f" * 64] = b"never"
    return told(scene.node.send(reply))


def withhold(scene: Scene) -> str:
    """Announce a reply, and let most of it never come."""
    reply = scene.reply()
    found = scene.node.announce(reply)
    answer = fleet_pb2.PushMessagesResponse.FromString(found.content)
    name = answer.objects_to_push[0]
    run_id = reply.message.metadata.run_id
    scene.node.push_object(answer.session_id, run_id, name, reply.objects[name])
    time.sleep(_HELD_SECONDS)
    return f"{told(found)}, and {len(reply.objects) - 1} objects never come"


def send_many_objects(scene: Scene) -> str:
    """Reply with thousands of records."""
    content = RecordDict()
    for i in range(_OBJECTS - 2):
        content[str(i)] = MetricRecord({"i": i})
    reply = pack_message(Message(content, reply_to=scene.asked))
    return told(scene.node.announce(reply))


def open_connections(scene: Scene) -> str:
    """Ask for work over hundreds of connections at once."""
    request = fleet_pb2.PullMessagesRequest(node=scene.node.proto())
    until = time.monotonic() + _HELD_SECONDS

    def ask(_: int) -> str:
        try:
            with scene.node.connected() as link:
                link.timeout = httpx.Timeout(max(until - time.monotonic(), 0.1))
                return told(scene.node.call("pull-messages", request, link))
        except httpx.TimeoutException:
            return "held"
        except httpx.HTTPError as error:
            return type(error).__name__

    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        return counted(pool.map(ask, range(_CONNECTIONS)))


def flood(scene: Scene) -> str:
    """Call as often as it can, over several connections."""

    def call(_: int) -> str:
        with suppress(httpx.HTTPError), scene.node.connected() as link:
            return counted(told(scene.node.beat(link)) for _ in range(_CALLS // 10))
        return "cut off"

    with ThreadPoolExecutor(10) as pool:
        return counted(pool.map(call, range(10)))


def reply_twice(scene: Scene) -> str:
    """Fail, and then reply all the same, twice."""
    found = [scene.node.fail(scene.asked)]
    found += [scene.node.send(scene.reply(value)) for value in (2.0, 3.0)]
    return ", then ".join(map(told, found))


def push_two(scene: Scene) -> str:
    """Push a surplus message with the first."""
    return told(scene.node.announce(scene.reply(4.0), scene.reply(5.0)))


def push_too_much(scene: Scene) -> str:
    """Push an object that is larger than the model."""
    found = scene.node.announce(scene.reply())
    answer = fleet_pb2.PushMessagesResponse.FromString(found.content)
    run_id = scene.asked.metadata.run_id
    name = answer.objects_to_push[0]
    return told(
        scene.node.push_object(answer.session_id, run_id, name, bytes(15 * 2**20))
    )


def read_anothers(scene: Scene) -> str:
    """Ask for what another node was sent, and say that it has come."""
    sent, _ = noted_messages(scene.trace)
    names = [m.id for m in sent if m.node == scene.others[0]][-1:] or ["0" * 64]
    run_id, node = scene.asked.metadata.run_id, scene.node.proto()
    pull = message_pb2.PullObjectRequest(node=node, run_id=run_id, object_id=names[0])
    confirm = message_pb2.ConfirmMessageReceivedRequest(
        node=node, run_id=run_id, message_object_id=names[0]
    )
    found = [
        scene.node.call("pull-object", pull),
        scene.node.call("confirm-message-received", confirm),
    ]
    return ", then ".join(map(told, found))


def send_away(scene: Scene) -> str:
    """Say that another node leaves."""
    request = fleet_pb2.DeactivateNodeRequest(node_id=scene.others[0])
    return told(scene.node.call("deactivate-node", request))


def be_silent(scene: Scene) -> str:
    """Do nothing but fail, for comparison."""
    return "nothing tried"


ATTACKS: dict[str, Attack] = {
    attack.__name__.replace("_", "-"): attack
    for attack in (
        be_silent,
        instruct_server,
        instruct_node,
        borrow_name,
        answer_for_another,
        poison,
        withhold,
        send_many_objects,
        open_connections,
        flood,
        reply_twice,
        push_two,
        push_too_much,
        read_anothers,
        send_away,
        *TRICKS,
    )
}


def attack_until_over(settings: Settings) -> None:
    """Attack in every round, in the order that was ordered, and then do nothing."""
    node = Speaker(
        settings.address,
        Path(settings.trusted),
        Path(settings.key),
        settings.number,
        ADDRESS,
    )
    node.activate()
    output = Path(settings.output)
    note(output, {"ready": True})
    threading.Thread(target=_keep_alive, args=(node,), daemon=True).start()
    ordered = iter(settings.attacks)
    while True:
        asked = node.pull()
        if asked is None:
            continue
        name = next(ordered, "be-silent")
        scene = Scene(node, asked, settings.others, Path(settings.trace))
        begin = time.monotonic()
        said = "; ".join(_tried(ATTACKS[part], scene) for part in name.split("+"))
        note(output, {"attack": name, "said": said, "begin": begin})
        node.fail(asked)


def _tried(attack: Attack, scene: Scene) -> str:
    try:
        return attack(scene)
    except httpx.HTTPError as error:
        return type(error).__name__


def _keep_alive(node: Speaker) -> None:
    with node.connected() as link:
        while True:
            time.sleep(HEARTBEAT_SECONDS / 3)
            with suppress(httpx.HTTPError):
                node.beat(link)


if __name__ == "__main__":
    attack_until_over(Settings(**json.loads(Path(sys.argv[1]).read_text())))
