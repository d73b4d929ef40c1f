"""What rounds cost at the door: ``python -m simulations.benchmarks.gate``.

HAProxy with the kit's configuration and the gate run as processes; a stand-in for the
SuperLink and honest nodes, who do no training, are in this one. So the figures are of
the door alone. With ``--hostile`` a registered node attacks in every round, as in
`simulations.chaos.hostile`; with ``--connections`` so many others stay connected.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import resource
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from flwr_safedshb.flower import inline_objects as inlining
from flwr_safedshb.flower.compat import set_process_run
from flwr_safedshb.flower.object_tree import walk_tree
from flwr_safedshb.node.flower_patches import fleet_api
from flwr_safedshb.node.flower_patches.fleet_api import (
    NodeProto,
    PackedMessage,
    fleet_pb2,
    message_from_proto,
    message_pb2,
    pack_message,
)
from simulations.chaos.hostile.attacks import ATTACKS
from simulations.chaos.hostile.insider import InsiderSettings
from simulations.loopback import free_port
from simulations.loopback.credentials import SCRIPT, Credentials
from simulations.loopback.signing import (
    Key,
    load_private_key,
    public_key_pem,
    sign_headers,
)

RUN, HOSTILE = 77, 99
_TICKS = os.sysconf("SC_CLK_TCK")
_MIB = 2**20


@dataclass
class SuperLink:
    """Stands for the SuperLink: an ASGI application that keeps all in memory."""

    nodes: dict[bytes, int] = field(default_factory=dict)
    waiting: dict[int, list[PackedMessage]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    replies: dict[str, set[str]] = field(default_factory=dict)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one call."""
        body = bytearray()
        while True:
            event = await receive()
            body += event.get("body", b"")
            if not event.get("more_body"):
                break
        headers = {key.decode(): value for key, value in scope["headers"]}
        number = self.nodes.get(base64.b64decode(headers[fleet_api.PUBLIC_KEY]))
        name = scope["path"].rpartition("/")[2]
        asked = fleet_api.parse_request(name, bytes(body))
        answer, status = b"", 401
        if number is not None:
            answer, status = self._answer(asked, number).SerializeToString(), 200
        length = [(b"content-length", str(len(answer)).encode())]
        start = {"type": "http.response.start", "status": status, "headers": length}
        await send(start)
        await send({"type": "http.response.body", "body": answer})

    def _answer(self, asked: Any, node: int) -> Any:
        match asked:
            case fleet_pb2.ActivateNodeRequest():
                return fleet_pb2.ActivateNodeResponse(node_id=node)
            case fleet_pb2.PullMessagesRequest() if self.waiting.get(node):
                packed = self.waiting[node].pop(0)
                return fleet_pb2.PullMessagesResponse(
                    messages_list=[packed.message], message_object_trees=[packed.tree]
                )
            case message_pb2.PullObjectRequest():
                content = self.objects.get(asked.object_id, b"")
                return message_pb2.PullObjectResponse(
                    object_found=bool(content),
                    object_available=bool(content),
                    object_content=content,
                )
            case fleet_pb2.PushMessagesRequest():
                (message,), (tree,) = asked.messages_list, asked.message_object_trees
                names = {part.object_id for part, _ in walk_tree(tree)}
                left = names - {*(inlining.read_inline(message) or {})}
                self.replies[message.metadata.reply_to_message_id] = left
                return fleet_pb2.PushMessagesResponse(
                    objects_to_push=sorted(left), session_id="s"
                )
            case message_pb2.PushObjectRequest():
                for left in self.replies.values():
                    left.discard(asked.object_id)
                return message_pb2.PushObjectResponse(stored=True)
            case message_pb2.ConfirmMessageReceivedRequest():
                return message_pb2.ConfirmMessageReceivedResponse()
        return fleet_pb2.PullMessagesResponse()


@dataclass
class Node:
    """An honest node, with a connection of its own."""

    link: httpx.AsyncClient
    number: int
    key: Key

    async def call(self, name: str, request: Any) -> bytes:
        """Make a call until it is answered, as Flower's SuperNode does."""
        while True:
            with suppress(httpx.TransportError):
                found = await self.link.post(
                    f"/v1/fleet/{name}",
                    content=request.SerializeToString(),
                    headers=sign_headers(self.key),
                )
                if found.status_code not in (502, 503, 504):
                    found.raise_for_status()
                    return found.content
            await asyncio.sleep(0.5)

    async def activate(self) -> None:
        """Come in."""
        request = fleet_pb2.ActivateNodeRequest(
            public_key=public_key_pem(self.key), heartbeat_interval=30
        )
        await self.call("activate-node", request)

    async def play_round(self, values: RecordDict) -> None:
        """Pull a message with all its objects, and push a reply with `values`."""
        node = NodeProto(node_id=self.number)
        given = fleet_pb2.PullMessagesResponse()
        while not given.messages_list:
            request = fleet_pb2.PullMessagesRequest(node=node)
            content = await self.call("pull-messages", request)
            given = fleet_pb2.PullMessagesResponse.FromString(content)
        head, tree = given.messages_list[0], given.message_object_trees[0]
        inline = inlining.read_inline(head) or {}
        for name in {part.object_id for part, _ in walk_tree(tree)} - {*inline}:
            pull = message_pb2.PullObjectRequest(node=node, object_id=name)
            await self.call("pull-object", pull)
        confirm = message_pb2.ConfirmMessageReceivedRequest(
            node=node, message_object_id=tree.object_id
        )
        await self.call("confirm-message-received", confirm)
        inlining.remove_inline(head)
        reply = pack_message(Message(values, reply_to=message_from_proto(head)))
        inline = inlining.select_inline(reply.tree.object_id, reply.objects) or {}
        inlining.attach_inline(reply.message, inline)
        push = fleet_pb2.PushMessagesRequest(
            node=node, messages_list=[reply.message], message_object_trees=[reply.tree]
        )
        content = await self.call("push-messages", push)
        told = fleet_pb2.PushMessagesResponse.FromString(content)
        for name in told.objects_to_push:
            part = message_pb2.PushObjectRequest(
                node=node,
                run_id=RUN,
                object_id=name,
                object_content=reply.objects[name],
                session_id=told.session_id,
            )
            await self.call("push-object", part)


def make_values(parameters: int, tensors: int, seed: int) -> RecordDict:
    """Return a model of so many parameters in so many tensors of one size."""
    rng = np.random.default_rng(seed)
    flat = rng.standard_normal(parameters, np.float32)
    record = ArrayRecord([*np.array_split(flat, tensors)])
    return RecordDict({"a": record, "m": MetricRecord({"num-examples": 1})})


def ask(superlink: SuperLink, numbers: list[int], values: RecordDict) -> list[str]:
    """Ask nodes for a step, as our server does; return the messages' ids."""
    set_process_run(RUN)
    names = []
    for number in numbers:
        packed = pack_message(Message(values, number, "train", ttl=3600.0))
        inline = inlining.select_inline(packed.tree.object_id, packed.objects) or {}
        inlining.attach_inline(packed.message, inline)
        pruned = inlining.prune_tree(packed.tree, inline)
        superlink.objects.update(packed.objects)
        superlink.waiting.setdefault(number, []).append(
            PackedMessage(packed.message, pruned, {})
        )
        names.append(packed.tree.object_id)
    return names


@dataclass
class Door:
    """The processes of the door, whose time and memory are read."""

    processes: dict[str, subprocess.Popen[bytes]]
    peaks: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def seconds(self, name: str) -> float:
        """Return the processor time that a process has taken."""
        stat = Path(f"/proc/{self.processes[name].pid}/stat").read_text()
        words = stat.rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / _TICKS

    async def watch(self) -> None:
        """Note the most memory that each process has, in MiB, until cancelled."""
        while True:
            for name, process in self.processes.items():
                for line in Path(f"/proc/{process.pid}/status").read_text().split("\n"):
                    if line.startswith("VmRSS:"):
                        mib = int(line.split()[1]) / 1024
                        self.peaks[name] = max(self.peaks[name], mib)
            await asyncio.sleep(0.05)


async def open_door(
    stack: AsyncExitStack, made: Credentials, inside: int
) -> tuple[Door, int]:
    """Start gate and proxy before a port; return them and where nodes come."""
    checker, outside = free_port(), free_port()
    door = Door({})
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin",
        "GATE": f"127.0.0.1:{outside}",
        "GATE_CERTIFICATE": str(made.certificate),
        "CHECKER": f"127.0.0.1:{checker}",
    }
    commands = {
        "gate": [
            *("safedshb", "gate", "--listen", f"127.0.0.1:{checker}"),
            *(
                "--superlink",
                f"127.0.0.1:{inside}",
                "--state-dir",
                str(made.folder / "gate"),
            ),
            *("--ssl-ca-certfile", str(made.ca)),
        ],
        "proxy": ["haproxy", "-f", str(SCRIPT.with_name("haproxy.cfg"))],
    }
    for name, command in commands.items():
        process = subprocess.Popen(command, env=environment)
        door.processes[name] = process
        stack.callback(process.wait)
        stack.callback(process.kill)
    for port in (checker, outside):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            except ConnectionRefusedError:
                await asyncio.sleep(0.1)
    return door, outside


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Play rounds, and print what they took."""
    superlink = SuperLink()
    async with AsyncExitStack() as stack:
        inside = free_port()
        made = Credentials(folder)
        door, port = await open_door(stack, made, inside)
        config = uvicorn.Config(
            superlink,
            port=inside,
            log_level="critical",
            lifespan="off",
            ssl_certfile=str(made.certificate),
            ssl_keyfile=str(made.certificate_key),
        )
        server = uvicorn.Server(config)
        tasks = [asyncio.create_task(t) for t in (server.serve(), door.watch())]
        for task in tasks:
            stack.callback(task.cancel)
        trusted = ssl.create_default_context(cafile=str(made.ca))

        async def come(number: int, own: str = "127.0.0.1") -> Node:
            link = httpx.AsyncClient(
                base_url=f"https://127.0.0.1:{port}",
                transport=httpx.AsyncHTTPTransport(verify=trusted, local_address=own),
                timeout=300.0,
                trust_env=False,
            )
            await stack.enter_async_context(link)
            node = Node(link, number, ec.generate_private_key(ec.SECP384R1()))
            superlink.nodes[public_key_pem(node.key)] = number
            await node.activate()
            return node

        nodes = [await come(number) for number in range(2, 2 + options.nodes)]
        for other in range(options.connections):
            await come(1000 + other, f"127.0.1.{1 + other // 30}")
        numbers = [node.number for node in nodes]
        if options.hostile:
            numbers.append(HOSTILE)
            stack.callback(start_hostile(superlink, made, port).kill)
        took, lost = [], 0
        before = {name: door.seconds(name) for name in door.processes}
        for number in range(options.rounds):
            asked = ask(
                superlink,
                numbers,
                make_values(options.parameters, options.tensors, number),
            )
            values = make_values(options.parameters, options.tensors, 10**6 + number)
            begin = time.monotonic()
            await asyncio.gather(*(node.play_round(values) for node in nodes))
            took.append(time.monotonic() - begin)
            honest = asked[: len(nodes)]
            lost += sum(superlink.replies.get(n, {""}) != set() for n in honest)
            superlink.objects.clear()
            superlink.replies.clear()
        messages = options.rounds * len(nodes)
        spent = {n: (door.seconds(n) - s) / messages for n, s in before.items()}
        load = os.getloadavg()[0]
        print(
            f"{options.parameters:,} parameters in {options.tensors} tensors, "
            f"{len(nodes)} nodes, {options.rounds} rounds, "
            f"{'a hostile node, ' * options.hostile}{options.connections} further "
            f"connections; load {load:.0f}\n"
            f"  seconds a round: median {statistics.median(took):.2f}, "
            f"most {max(took):.2f}; honest replies lost: {lost} of {messages}\n"
            f"  processor seconds a message: gate {spent['gate']:.3f}, "
            f"proxy {spent['proxy']:.3f}\n"
            f"  MiB at most: gate {door.peaks['gate']:.0f}, "
            f"proxy {door.peaks['proxy']:.0f}"
        )


def start_hostile(
    superlink: SuperLink, made: Credentials, port: int
) -> subprocess.Popen[bytes]:
    """Start the hostile program of the chaos suite, which attacks in each round."""
    key = made.node_key("hostile")
    superlink.nodes[public_key_pem(load_private_key(key.read_bytes()))] = HOSTILE
    attacks = [name for name in ATTACKS if name != "be-silent"]
    settings = InsiderSettings(
        f"127.0.0.1:{port}",
        str(made.ca),
        str(key),
        HOSTILE,
        [2],
        str(made.folder / "trace"),
        str(made.folder / "insider.jsonl"),
        attacks,
    )
    (made.folder / "trace").touch()
    path = made.folder / "insider.json"
    path.write_text(json.dumps(asdict(settings)))
    module = "simulations.chaos.hostile.insider"
    return subprocess.Popen([sys.executable, "-m", module, str(path)])


def main() -> None:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=5_000_000)
    parser.add_argument("--tensors", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=0)
    parser.add_argument("--hostile", action="store_true")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(options, Path(folder)))


if __name__ == "__main__":
    main()
