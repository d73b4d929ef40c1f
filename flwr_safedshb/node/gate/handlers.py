"""How the gate handles each call of a node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import cast

from google.protobuf.message import Message

from flwr_safedshb.flower.object_tree import is_object_id
from flwr_safedshb.node.flower_patches import fleet_api
from flwr_safedshb.node.flower_patches.fleet_api import (
    HEARTBEAT_SECONDS,
    NodeProto,
    fab_pb2,
    fleet_pb2,
    heartbeat_pb2,
    message_pb2,
    pack_error_reply,
)
from flwr_safedshb.node.gate.backend import Backend
from flwr_safedshb.node.gate.limits import Limits
from flwr_safedshb.node.gate.object_cache import parse_object
from flwr_safedshb.node.gate.request import (
    Connection,
    RejectedError,
    Request,
    Response,
)
from flwr_safedshb.node.gate.staging import Question, StagedReply, StagingArea

# Times that a SuperLink may fail over one reply.
_MAX_TRIES = 4
_LOST = "the node was started again, and its message is lost"
Headers = tuple[tuple[str, str], ...]
_PROTOBUF: Headers = (("content-type", "application/protobuf"),)


class NodeSession:
    """A key, the node that it belongs to, and what that node is doing.

    Attributes
    ----------
    owner : str
        The key's hash.
    node_id : int, optional
        Known once the SuperLink has accepted a call.
    requests, calls : Semaphore
        Requests that are read, handled or answered, and calls of the SuperLink, at a
        time.
    connections : set
        By which its requests have come; some are closed.
    held_pull : object, optional
        The call for work that is held; a newer one takes its place.
    """

    def __init__(
        self, owner: str, node_id: int | None, limits: Limits, staging: StagingArea
    ) -> None:
        self.owner, self.node_id, self.staging = owner, node_id, staging
        self.requests = asyncio.Semaphore(limits.node_requests)
        self.calls = asyncio.Semaphore(limits.node_calls)
        self.connections: set[Connection] = set()
        self.held_pull: object | None = None

    def note_connection(self, connection: Connection, is_open: set[Connection]) -> None:
        """Note that a request of the node came by a connection."""
        if connection not in self.connections:
            self.connections = (self.connections & is_open) | {connection}

    def find_others(
        self, connection: Connection, is_open: set[Connection]
    ) -> set[Connection]:
        """Return the node's open connections but one."""
        return (self.connections & is_open) - {connection}


class RequestHandler:
    """Handle one request of one node.

    Parameters
    ----------
    backend : Backend
    session : NodeSession
    request : Request
    calls : Semaphore
        Calls of the SuperLink at a time; all unknown keys share one.
    is_alone : bool
        Whether no other connection of the node is open.
    """

    def __init__(
        self,
        backend: Backend,
        session: NodeSession,
        request: Request,
        calls: asyncio.Semaphore,
        is_alone: bool,
    ) -> None:
        self._backend, self._session, self._request = backend, session, request
        self._calls, self._is_alone = calls, is_alone

    async def handle(self, name: str) -> Response:
        """Check a call, pass on what must be passed on, and return the response."""
        staging = self._session.staging
        if name == "push-object":
            # What holds the object's bytes ends before anything is waited for.
            staged = self._store_object(await self._request.read_body())
            await self._deliver_if_complete(staged)
            return _make_response(message_pb2.PushObjectResponse(stored=True))
        match message := self._parse(name, await self._request.read_body()):
            case fleet_pb2.PullMessagesRequest():
                return await self._pull_messages(message)
            case fleet_pb2.PushMessagesRequest():
                staged = staging.stage_reply(message)
                await self._deliver_if_complete(staged)
                return _make_response(staged.missing_objects())
            case message_pb2.PullObjectRequest():
                return await self._pull_object(message)
            case message_pb2.ConfirmMessageReceivedRequest():
                return await self._confirm(message)
            case fleet_pb2.ActivateNodeRequest():
                return await self._activate(message)
            case heartbeat_pb2.SendNodeHeartbeatRequest():
                _bound_heartbeat(message)
            case fab_pb2.GetFabRequest():
                # The SuperLink writes it into its log as it is.
                if not is_object_id(message.hash_str):
                    raise RejectedError(400, "an app without a proper hash")
        return await self._pass_on(name, message)

    def _parse(self, name: str, body: bytes) -> Message:
        try:
            message = fleet_api.parse_request(name, body)
        except ValueError as error:
            raise RejectedError(400, str(error)) from error
        claimed, known = fleet_api.claimed_node_id(message), self._session.node_id
        if None not in (claimed, known) and claimed != known:
            raise RejectedError(400, "a call in the name of another node")
        return message

    async def _pass_on(self, name: str, message: Message) -> Response:
        response = await self._backend.call(self._calls, self._request, name, message)
        if response.status < 400 and self._session.node_id is None:
            node_id = fleet_api.claimed_node_id(message)
            if node_id is None:  # an activation: the response says who it is
                content = response.read_body()
                node_id = fleet_pb2.ActivateNodeResponse.FromString(content).node_id
            self._session.node_id = node_id
        return response

    async def _activate(self, message: fleet_pb2.ActivateNodeRequest) -> Response:
        """Let a node in, at once also after it was killed.

        Flower takes a killed node for connected until two heartbeats are missing, and
        lets nobody else in under its key. A node without connections is not connected.
        And a SuperNode that starts knows nothing of what the one before was given: that
        is answered for it, or the server would wait until the round is over.
        """
        session = self._session
        _bound_heartbeat(message)
        response = await self._pass_on("activate-node", message)
        if session.node_id is None:
            return response
        if response.status >= 400 and self._is_alone:
            leave = fleet_pb2.DeactivateNodeRequest(node_id=session.node_id)
            await self._pass_on("deactivate-node", leave)
            response = await self._pass_on("activate-node", message)
        if response.status < 400:
            # The server may not wait for any of it any more.
            if (staged := session.staging.find_undelivered()) is not None:
                with suppress(RejectedError):
                    await self._deliver_if_complete(staged)
            for question in session.staging.find_unanswered():
                with suppress(RejectedError):
                    await self._answer_with_error(question)
        return response

    async def _answer_with_error(self, question: message_pb2.Metadata) -> None:
        error = pack_error_reply(question, _LOST)
        message = fleet_pb2.PushMessagesRequest(
            node=NodeProto(node_id=question.dst_node_id),
            messages_list=[error.message],
            message_object_trees=[error.tree],
        )
        staged = self._session.staging.stage_reply(message)
        for name, content in error.objects.items():
            staged.add_object(name, content)
        await self._deliver_if_complete(staged)

    async def _pull_messages(self, message: fleet_pb2.PullMessagesRequest) -> Response:
        """Return work; hold the call until there is some."""
        session = self._session
        until = time.monotonic() + self._backend.limits.hold_seconds
        mine = session.held_pull = object()
        if (lost := session.staging.give_again()) is not None:
            return _make_response(lost.given)
        while True:
            is_known = session.node_id is not None
            response = await self._pass_on("pull-messages", message)
            if response.status >= 400:
                return response
            given = fleet_pb2.PullMessagesResponse.FromString(response.read_body())
            if given.messages_list:
                question = session.staging.add_question(given)
                self._backend.announce_work()
                return _make_response(question.given, response.headers)
            is_late = not is_known or time.monotonic() >= until
            if is_late or session.held_pull is not mine:
                return response
            await self._backend.wait_for_work()
            if self._request.has_hung_up():
                raise RejectedError(499, "a node that hung up while it waited")

    async def _pull_object(self, message: message_pb2.PullObjectRequest) -> Response:
        question = self._session.staging.find_question_with(message.object_id)
        return await self._get_object(question, message)

    async def _get_object(
        self, question: Question, message: message_pb2.PullObjectRequest
    ) -> Response:
        name = message.object_id
        if name in question.inline:
            return _make_response(
                message_pb2.PullObjectResponse(
                    object_found=True,
                    object_available=True,
                    object_content=question.inline[name],
                )
            )
        message.run_id = question.metadata.run_id
        return await self._backend.objects.get(
            name, self._request.resources, lambda: self._fetch_object(message)
        )

    async def _fetch_object(self, message: message_pb2.PullObjectRequest) -> Response:
        """Fetch an object as soon as the server has sent it; a node would wait more."""
        limits = self._backend.limits
        until = time.monotonic() + limits.object_seconds
        while True:
            response = await self._backend.fetch(self._request, "pull-object", message)
            found = parse_object(response)
            is_coming = found and found.object_found and not found.object_available
            is_late = time.monotonic() >= until or self._request.has_hung_up()
            if is_late or not is_coming:
                return response
            await asyncio.sleep(limits.poll_seconds)

    async def _confirm(
        self, message: message_pb2.ConfirmMessageReceivedRequest
    ) -> Response:
        """Note that a node has received a message.

        The SuperLink deletes the message then, perhaps before the server has sent all
        of it: so each of its objects must have been there. That is looked up, because
        nodes do not pull objects that they have from before.
        """
        staging, objects = self._session.staging, self._backend.objects
        question = staging.find_question(message.message_object_id)
        if question.max_size is None:
            for name in sorted(question.objects - {*question.inline}):
                if objects.find_part(name) is None:
                    pull = message_pb2.PullObjectRequest(
                        node=message.node, object_id=name
                    )
                    response = await self._get_object(question, pull)
                    found = parse_object(response)
                    if found is None or not found.object_available:
                        raise RejectedError(400, "a message that has not come yet")
            is_inline = question.objects <= {*question.inline}
            staging.note_received(question)
            if is_inline:  # and the SuperLink has none of its objects
                return _make_response(message_pb2.ConfirmMessageReceivedResponse())
        message.run_id = question.metadata.run_id
        return await self._pass_on("confirm-message-received", message)

    def _store_object(self, body: bytes) -> StagedReply:
        """Store an object of a reply; return the reply."""
        message = cast(message_pb2.PushObjectRequest, self._parse("push-object", body))
        staged = self._session.staging.find_staged(message)
        if not staged.is_over:
            staged.add_object(message.object_id, message.object_content)
        return staged

    async def _deliver_if_complete(self, staged: StagedReply) -> None:
        if staged.is_complete:
            async with staged.delivery:
                if not staged.is_over:
                    await self._deliver(staged)

    async def _deliver(self, staged: StagedReply) -> None:
        """Deliver a complete reply, as its node would have.

        If the SuperLink fails, the node may push its last object again a few times: the
        same bytes are sent, and nothing is paid for twice.
        """
        staged.tries += 1
        self._session.staging.note_answered(staged.question)
        first = staged.first_push()
        content = await self._send(staged, self._pass_on("push-messages", first))
        response = fleet_pb2.PushMessagesResponse.FromString(content)
        for name in staged.list_pushes(first, response):
            push = staged.make_push(name, response.session_id)
            with staged.open_object(name) as file:
                call = self._backend.push(self._calls, self._request, push, file)
                await self._send(staged, call)
        self._session.staging.end_reply(staged)

    async def _send(self, staged: StagedReply, call: Awaitable[Response]) -> bytes:
        response = await call
        if response.status < 400:
            return response.read_body()
        may_retry = response.status >= 500 and staged.tries < _MAX_TRIES
        if not may_retry:
            self._session.staging.end_reply(staged)
        status = 503 if may_retry else response.status
        raise RejectedError(status, "a reply that the SuperLink refused")


def _bound_heartbeat(
    message: fleet_pb2.ActivateNodeRequest | heartbeat_pb2.SendNodeHeartbeatRequest,
) -> None:
    # A node that leaves without a word is waited for twice as long.
    interval = min(message.heartbeat_interval, HEARTBEAT_SECONDS)
    message.heartbeat_interval = interval


def _make_response(message: Message, headers: Headers = _PROTOBUF) -> Response:
    return Response(200, cast(bytes, message.SerializeToString()), headers)
