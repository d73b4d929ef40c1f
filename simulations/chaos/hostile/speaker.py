"""A program with a key that speaks the Fleet API by itself, and need not keep to it."""

from __future__ import annotations

import ssl
import time
from pathlib import Path

import httpx
from flwr.app import Error, Message
from google.protobuf.message import Message as Proto

from flwr_safedshb.flower.compat import set_process_run
from flwr_safedshb.node.flower_patches import fleet_api
from flwr_safedshb.node.flower_patches.fleet_api import (
    NodeProto,
    PackedMessage,
    fleet_pb2,
    message_from_proto,
    message_pb2,
    pack_message,
)
from simulations.loopback.signing import load_private_key, public_key_pem, sign_headers

HEARTBEAT_SECONDS = 30.0
# How long, and how soon, a call is made again whose connection was closed.
_TRIED_SECONDS, _PAUSE_SECONDS = 30.0, 0.2


class Speaker:
    """A node that is no SuperNode.

    Parameters
    ----------
    address : str
        Of the gate, host:port.
    trusted : Path
        Certificate that the gate's must be signed by.
    key : Path
        The node's private key.
    number : int
        Its id.
    own : str
        The address that it calls from.
    """

    def __init__(
        self,
        address: str,
        trusted: Path,
        key: Path,
        number: int,
        own: str = "127.0.0.1",
    ) -> None:
        self.address, self.number = address, number
        self.source = (own, 0)
        self.key = load_private_key(key.read_bytes())
        self.trusted = ssl.create_default_context(cafile=str(trusted))
        self.link = self.connected()

    def connected(self) -> httpx.Client:
        """Return a connection of its own."""
        return httpx.Client(
            base_url=f"https://{self.address}",
            transport=httpx.HTTPTransport(
                verify=self.trusted, local_address=self.source[0]
            ),
            timeout=60.0,
            trust_env=False,
        )

    def proto(self, number: int | None = None) -> NodeProto:
        """Return the node as requests name it."""
        return NodeProto(node_id=self.number if number is None else number)

    def call(
        self, name: str, request: Proto, link: httpx.Client | None = None
    ) -> httpx.Response:
        """Make a call, and return whatever comes back.

        A server may close a connection that is kept for the next call, also at the
        moment when that call is on its way: over the node's own connection it is made
        again, as Flower's SuperNode does. Others are for attacks, which are cut off.
        """
        until = time.monotonic() + (_TRIED_SECONDS if link is None else 0.0)
        while True:
            try:
                return (link or self.link).post(
                    f"/v1/fleet/{name}",
                    content=request.SerializeToString(),
                    headers=sign_headers(self.key),
                )
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                if time.monotonic() > until:
                    raise
                time.sleep(_PAUSE_SECONDS)

    def activate(self) -> None:
        """Be a node that is there."""
        request = fleet_pb2.ActivateNodeRequest(
            public_key=public_key_pem(self.key), heartbeat_interval=HEARTBEAT_SECONDS
        )
        self.call("activate-node", request).raise_for_status()

    def beat(self, link: httpx.Client | None = None) -> httpx.Response:
        """Say that it is still there."""
        request = fleet_api.CALLS["send-node-heartbeat"](
            node=self.proto(), heartbeat_interval=HEARTBEAT_SECONDS
        )
        return self.call("send-node-heartbeat", request, link)

    def pull(self) -> Message | None:
        """Return the next message, to reply to, if there is one."""
        request = fleet_pb2.PullMessagesRequest(node=self.proto())
        found = self.call("pull-messages", request)
        found.raise_for_status()
        given = fleet_pb2.PullMessagesResponse.FromString(found.content)
        if not given.messages_list:
            return None
        message = message_from_proto(given.messages_list[0])
        set_process_run(message.metadata.run_id)
        return message

    def announce(
        self, *pushed: PackedMessage, number: int | None = None
    ) -> httpx.Response:
        """Begin to push messages."""
        request = fleet_pb2.PushMessagesRequest(
            node=self.proto(number),
            messages_list=[each.message for each in pushed],
            message_object_trees=[each.tree for each in pushed],
            clientapp_runtime_list=[0.1] * len(pushed),
        )
        return self.call("push-messages", request)

    def push_object(
        self, session: str, run_id: int, name: str, content: bytes
    ) -> httpx.Response:
        """Push one object of a message."""
        request = message_pb2.PushObjectRequest(
            node=self.proto(),
            run_id=run_id,
            object_id=name,
            object_content=content,
            session_id=session,
        )
        return self.call("push-object", request)

    def send(self, pushed: PackedMessage) -> httpx.Response:
        """Push a message with all its objects; return the last answer."""
        found = self.announce(pushed)
        if found.status_code >= 400:
            return found
        answer = fleet_pb2.PushMessagesResponse.FromString(found.content)
        run_id = pushed.message.metadata.run_id
        for name in answer.objects_to_push:
            content = pushed.objects[name]
            found = self.push_object(answer.session_id, run_id, name, content)
            if found.status_code >= 400:
                return found
        return found

    def fail(self, asked: Message) -> httpx.Response:
        """Response as a node whose client has crashed."""
        return self.send(pack_message(Message(Error(0, "crashed"), reply_to=asked)))


def told(response: httpx.Response) -> str:
    """Return what the gate says, in words."""
    words = response.text if response.status_code >= 400 else "accepted"
    return f"{response.status_code} {words}"
