"""A node that is no SuperNode: it speaks the Fleet API by itself, as it likes."""

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


class FleetNode:
    """A program with a node's private key and id, `number`.

    It calls the gate at `address` (host:port), whose certificate `trusted` must have
    signed, from the address `own`.
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
        self.link = self.open_link()

    def open_link(self) -> httpx.Client:
        """Return a connection of its own."""
        return httpx.Client(
            base_url=f"https://{self.address}",
            transport=httpx.HTTPTransport(
                verify=self.trusted, local_address=self.source[0]
            ),
            timeout=60.0,
            trust_env=False,
        )

    def make_proto(self, number: int | None = None) -> NodeProto:
        """Return the node as requests name it."""
        return NodeProto(node_id=self.number if number is None else number)

    def call(
        self, name: str, request: Proto | bytes, link: httpx.Client | None = None
    ) -> httpx.Response:
        """Make a call, and return whatever comes back.

        A server may close a connection that is kept for the next call, also at the
        moment when that call is on its way: over the node's own connection it is made
        again, as Flower's SuperNode does. Others are for attacks, which are cut off.
        """
        body = request if isinstance(request, bytes) else request.SerializeToString()
        until = time.monotonic() + (_TRIED_SECONDS if link is None else 0.0)
        while True:
            try:
                return (link or self.link).post(
                    f"/v1/fleet/{name}", content=body, headers=sign_headers(self.key)
                )
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                if time.monotonic() > until:
                    raise
                time.sleep(_PAUSE_SECONDS)

    def activate_node(self) -> None:
        """Be a node that is there."""
        request = fleet_pb2.ActivateNodeRequest(
            public_key=public_key_pem(self.key), heartbeat_interval=HEARTBEAT_SECONDS
        )
        self.call("activate-node", request).raise_for_status()

    def send_heartbeat(self, link: httpx.Client | None = None) -> httpx.Response:
        """Say that it is still there."""
        request = fleet_api.CALLS["send-node-heartbeat"](
            node=self.make_proto(), heartbeat_interval=HEARTBEAT_SECONDS
        )
        return self.call("send-node-heartbeat", request, link)

    def pull_message(self) -> Message | None:
        """Return the next message, to reply to, if there is one."""
        request = fleet_pb2.PullMessagesRequest(node=self.make_proto())
        response = self.call("pull-messages", request)
        response.raise_for_status()
        given = fleet_pb2.PullMessagesResponse.FromString(response.content)
        if not given.messages_list:
            return None
        message = message_from_proto(given.messages_list[0])
        set_process_run(message.metadata.run_id)
        return message

    def announce_push(
        self, *pushed: PackedMessage, number: int | None = None, seconds: float = 0.1
    ) -> httpx.Response:
        """Begin to push messages, whose steps took so many seconds."""
        request = fleet_pb2.PushMessagesRequest(
            node=self.make_proto(number),
            messages_list=[each.message for each in pushed],
            message_object_trees=[each.tree for each in pushed],
            clientapp_runtime_list=[seconds] * len(pushed),
        )
        return self.call("push-messages", request)

    def push_object(
        self, announced: httpx.Response, run_id: int, name: str, content: bytes
    ) -> httpx.Response:
        """Push one object of a message whose announcement was answered."""
        answer = fleet_pb2.PushMessagesResponse.FromString(announced.content)
        request = message_pb2.PushObjectRequest(
            node=self.make_proto(),
            run_id=run_id,
            object_id=name,
            object_content=content,
            session_id=answer.session_id,
        )
        return self.call("push-object", request)

    def push_message(self, pushed: PackedMessage) -> httpx.Response:
        """Push a message with all its objects; return the last answer."""
        response = announced = self.announce_push(pushed)
        if announced.status_code >= 400:
            return announced
        for name in objects_to_push(announced):
            run_id, content = pushed.message.metadata.run_id, pushed.objects[name]
            response = self.push_object(announced, run_id, name, content)
            if response.status_code >= 400:
                break
        return response

    def send_failure(self, asked: Message) -> httpx.Response:
        """Answer as a node whose client has crashed."""
        return self.push_message(
            pack_message(Message(Error(0, "crashed"), reply_to=asked))
        )


def objects_to_push(announced: httpx.Response) -> list[str]:
    """Return the names of the objects that an answer to an announcement asks for."""
    answer = fleet_pb2.PushMessagesResponse.FromString(announced.content)
    return list(answer.objects_to_push)
