"""A gate on the loopback, a stand-in for the SuperLink behind it, and nodes that call.

The stand-in keeps what reaches it. Nodes sign as Flower's SuperNode does, and messages
are Flower's own objects.
"""

import asyncio
import base64
import ipaddress
import os
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
)
from google.protobuf.message import Message as Proto

from flwr_safedshb import node as node_room
from flwr_safedshb.flower.compat import set_process_run
from flwr_safedshb.flower.object_tree import walk_tree
from flwr_safedshb.node.flower_patches import fleet_api
from flwr_safedshb.node.flower_patches.fleet_api import (
    NodeProto,
    fleet_pb2,
    message_pb2,
)
from flwr_safedshb.node.gate.gate import Gate, open_listener
from flwr_safedshb.node.gate.limits import Limits
from flwr_safedshb.node.gate.request import Request
from simulations.loopback import free_port
from simulations.loopback.signing import public_key_pem, sign_headers
from tests.guard import HANGS

__all__ = ["sign_headers"]

RUN = 77


@dataclass(repr=False)  # asyncio would write out all that came
class SuperLink:
    """Stands for the SuperLink: who is registered, what waits for them, what came."""

    nodes: dict[bytes, int] = field(default_factory=dict)
    waiting: dict[int, list[Message]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    calls: list[tuple[str, Proto, dict[str, str]]] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0
    delay: float = 0.0

    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        name = request.url.path.removeprefix("/v1/fleet/")
        asked = fleet_api.parse_request(name, request.content)
        self.calls.append((name, asked, dict(request.headers)))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(self.delay)
        self.under_way -= 1
        key = base64.b64decode(request.headers[fleet_api.PUBLIC_KEY])
        if key not in self.nodes:
            return httpx.Response(401, text="Invalid SuperNode authentication")
        number = fleet_api.claimed_node_id(asked)
        if number not in (None, self.nodes[key]):
            return httpx.Response(401, text="Invalid SuperNode authentication")
        answer = self._answer(asked, self.nodes[key]).SerializeToString()
        return httpx.Response(200, content=answer, headers={"x-inside": "secret"})

    def _answer(self, asked: Proto, node: int) -> Proto:
        match asked:
            case fleet_pb2.ActivateNodeRequest():
                return fleet_pb2.ActivateNodeResponse(node_id=node)
            case fleet_pb2.PullMessagesRequest():
                found = self.waiting.get(node, [])
                if not found:
                    return fleet_pb2.PullMessagesResponse()
                message = found.pop(0)
                for name, part in get_all_nested_objects(message).items():
                    self.objects[name] = part.deflate()
                return fleet_pb2.PullMessagesResponse(
                    messages_list=[message_to_proto(bare(message))],
                    message_object_trees=[get_object_tree(message)],
                )
            case message_pb2.PullObjectRequest():
                content = self.objects.get(asked.object_id, b"")
                return message_pb2.PullObjectResponse(
                    object_found=bool(content),
                    object_available=bool(content),
                    object_content=content,
                )
            case fleet_pb2.PushMessagesRequest():
                tree = asked.message_object_trees[0]
                ids = {part.object_id for part, _ in walk_tree(tree)}
                return fleet_pb2.PushMessagesResponse(
                    objects_to_push=sorted(ids), session_id="inside"
                )
            case message_pb2.PushObjectRequest():
                self.objects[asked.object_id] = asked.object_content
                return message_pb2.PushObjectResponse(stored=True)
        return message_pb2.ConfirmMessageReceivedResponse()


def bare(message: Message) -> Message:
    return remove_content_from_message(message) if message.has_content() else message


def question(node: int, size: int = 3) -> Message:
    """What a server asks of a node."""
    set_process_run(RUN)
    arrays = ArrayRecord([np.arange(size, dtype=np.float32)])
    message = Message(RecordDict({"arrays": arrays}), node, "train", ttl=60.0)
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


def reply(asked: Message, size: int = 3, **changes: object) -> Message:
    """What an honest node answers, but for `changes` of its metadata."""
    content = RecordDict(
        {
            "arrays": ArrayRecord([np.ones(size, np.float32)]),
            "metrics": MetricRecord({"num-examples": 10}),
        }
    )
    answer = Message(content, reply_to=asked)
    for name, value in changes.items():
        answer.metadata.__dict__[f"_{name}"] = value
    answer.metadata.__dict__["_message_id"] = answer.object_id
    return answer


@dataclass
class Node:
    """A node with a key of its own, and a connection to the gate."""

    link: httpx.AsyncClient
    number: int
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        return public_key_pem(self.key)

    async def call(self, name: str, request: Proto, **more: str) -> httpx.Response:
        return await self.link.post(
            f"/v1/fleet/{name}",
            content=request.SerializeToString(),
            headers={**sign_headers(self.key), **more},
        )

    def proto(self) -> NodeProto:
        return NodeProto(node_id=self.number)

    async def activate(self) -> httpx.Response:
        request = fleet_pb2.ActivateNodeRequest(
            public_key=self.pem, heartbeat_interval=30
        )
        return await self.call("activate-node", request)

    async def pull(self) -> fleet_pb2.PullMessagesResponse:
        request = fleet_pb2.PullMessagesRequest(node=self.proto())
        found = await self.call("pull-messages", request)
        assert found.status_code == 200, found.text
        given: fleet_pb2.PullMessagesResponse
        given = fleet_pb2.PullMessagesResponse.FromString(found.content)
        return given

    async def pull_object(self, name: str) -> httpx.Response:
        request = message_pb2.PullObjectRequest(
            node=self.proto(), run_id=RUN, object_id=name
        )
        return await self.call("pull-object", request)

    async def confirm(self, message_id: str) -> httpx.Response:
        request = message_pb2.ConfirmMessageReceivedRequest(
            node=self.proto(), run_id=RUN, message_object_id=message_id
        )
        return await self.call("confirm-message-received", request)

    async def announce(
        self, message: Message, change: Callable[[Any], None] = lambda request: None
    ) -> httpx.Response:
        request = fleet_pb2.PushMessagesRequest(
            node=self.proto(),
            messages_list=[message_to_proto(bare(message))],
            message_object_trees=[get_object_tree(message)],
            clientapp_runtime_list=[0.5],
        )
        change(request)
        return await self.call("push-messages", request)

    async def push_object(
        self, session: str, name: str, content: bytes
    ) -> httpx.Response:
        request = message_pb2.PushObjectRequest(
            node=self.proto(),
            run_id=RUN,
            object_id=name,
            object_content=content,
            session_id=session,
        )
        return await self.call("push-object", request)


def certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 that vouches for itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gate")])
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    shown, secret = folder / "gate.crt", folder / "gate.key"
    shown.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return shown, secret


@dataclass
class Place:
    """A running gate: where it is, what is behind it, and how to come to it."""

    gate: Gate
    superlink: SuperLink
    port: int
    trusted: ssl.SSLContext

    def cut(self, request: Request) -> None:
        """Break off the connection by which a request has come."""
        for connection in self.gate.server.server_state.connections:
            if connection.client == request.connection:
                connection.transport.abort()

    @asynccontextmanager
    async def node(self, number: int, registered: bool = True) -> AsyncIterator[Node]:
        key = ec.generate_private_key(ec.SECP384R1())
        if registered:
            self.superlink.nodes[public_key_pem(key)] = number
        url = f"https://127.0.0.1:{self.port}"
        async with httpx.AsyncClient(
            base_url=url, verify=self.trusted, timeout=HANGS, trust_env=False
        ) as link:
            node = Node(link, number, key)
            if registered:
                assert (await node.activate()).status_code == 200
            yield node

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=self.trusted)


def unhurried(limits: Limits) -> Limits:
    """Return limits that no caller on a busy machine reaches.

    A test that waits for a body gives `body_seconds` another value than the default.
    """
    if limits.body_seconds == Limits().body_seconds:
        return replace(limits, body_seconds=HANGS)
    return limits


@asynccontextmanager
async def running(
    folder: Path,
    limits: Limits,
    superlink: SuperLink | None = None,
    proxied: bool = False,
) -> AsyncIterator[Place]:
    """Run a gate until the context is left, perhaps behind the kit's proxy.

    A second one in the same folder knows what the first did.
    """
    shown, secret = folder / "gate.crt", folder / "gate.key"
    if not shown.exists():
        certificate(folder)
    trusted = ssl.create_default_context(cafile=str(shown))
    behind = superlink or SuperLink()
    gate = Gate(
        "10.0.0.1:9091",
        trusted,
        folder / "gate",
        unhurried(limits),
        None if proxied else (shown, secret),
        httpx.MockTransport(behind),
    )
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(open_listener("127.0.0.1", 0))
        port = listener.getsockname()[1]
        task = asyncio.create_task(gate.serve(listener))
        stack.push_async_callback(gate.server.shutdown)
        stack.push_async_callback(asyncio.wait, [task])
        stack.callback(task.cancel)
        while not gate.server.started:
            await asyncio.sleep(0)
        if proxied:
            port = await stack.enter_async_context(proxy(shown, port))
        yield Place(gate, behind, port, trusted)


KIT = Path(node_room.__file__).parent / "template"


@asynccontextmanager
async def proxy(shown: Path, port: int, host: str = "127.0.0.1") -> AsyncIterator[int]:
    """Run HAProxy with the kit's configuration before a port; yield its own."""
    haproxy = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
    assert haproxy, "install haproxy: the kit's configuration is tested with it"
    own = free_port()
    addresses = {
        "GATE": f"{host}:{own}",
        "GATE_CERTIFICATE": str(shown),
        "CHECKER": f"127.0.0.1:{port}",
    }
    process = await asyncio.create_subprocess_exec(
        haproxy, "-f", str(KIT / "haproxy.cfg"), env={**os.environ, **addresses}
    )
    try:
        while True:
            with suppress(ConnectionRefusedError):
                _, writer = await asyncio.open_connection(host, own)
                writer.close()
                break
            assert process.returncode is None
            await asyncio.sleep(0.01)
        yield own
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


# A hold that no test waits for.
QUICK = Limits(hold_seconds=0.05, poll_seconds=0.01)


def visited(
    folder: Path,
    visit: Callable[[Place], Awaitable[None]],
    limits: Limits = QUICK,
    superlink: SuperLink | None = None,
    proxied: bool = False,
) -> SuperLink:
    """Run a gate for one visit, and return what has come through it."""

    async def story() -> SuperLink:
        async with (
            asyncio.timeout(HANGS),
            running(folder, limits, superlink, proxied) as place,
        ):
            await visit(place)
            return place.superlink

    return asyncio.run(story())
