"""How the gate handles each call of a node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from google.protobuf.message import Message

from flwr_safedshb.flower.object_tree import is_object_id
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
from flwr_safedshb.node.gate.http import (
    ClientConnection,
    RejectedError,
    Request,
    Response,
)
from flwr_safedshb.node.gate.limits import Limits
from flwr_safedshb.node.gate.object_cache import parse_object
from flwr_safedshb.node.gate.staging import StagedReply, StagingArea

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
        The key's hash, once the SuperLink has accepted a call; before that all unknown
        keys are one owner.
    calls : Semaphore
        Calls of the SuperLink at a time; all unknown keys share one.
    node_id : int, optional
        Known once the SuperLink has accepted a call.
    held_pull : object, optional
        The call for work that is held; a newer one takes its place.
    """

    def __init__(self, owner: str, calls: asyncio.Semaphore, limits: Limits) -> None:
        self.owner, self.calls = owner, calls
        self.node_id: int | None = None
        self.staging = StagingArea(limits)
        self.num_requests = 0
        self.held_pull: object | None = None


class RequestHandler:
    """Handle one request of one node.

    Parameters
    ----------
    backend : Backend
    session : NodeSession
    request : Request
    is_only_connection : callable
        Returns True if a connection is its node's only one.
    """

    def __init__(
        self,
        backend: Backend,
        session: NodeSession,
        request: Request,
        is_only_connection: Callable[[ClientConnection], bool],
    ) -> None:
        self._backend, self._session, self._request = backend, session, request
        self._is_only_connection = is_only_connection

    async def handle(self, name: str, message: Message) -> Response:
        """Check a call, pass on what must be passed on, and return the response."""
        staging = self._session.staging
        match message:
            case fleet_pb2.PullMessagesRequest():
                return await self._pull_messages(message)
            case fleet_pb2.PushMessagesRequest():
                staged = staging.stage_reply(message)
                await self._deliver_if_complete(staged)
                return _make_response(staged.missing_objects())
            case message_pb2.PushObjectRequest():
                return await self._push_object(message)
            case message_pb2.PullObjectRequest():
                return await self._pull_object(message)
            case message_pb2.ConfirmMessageReceivedRequest():
                question = staging.find_question(message.message_object_id)
                # It makes the SuperLink delete the message, perhaps before the server
                # has sent all of it.
                if not question.is_received:
                    raise RejectedError(400, "a message that has not come yet")
                if {*question.objects} <= {*question.inline}:
                    return _make_response(message_pb2.ConfirmMessageReceivedResponse())
                message.run_id = question.metadata.run_id
            case fleet_pb2.ActivateNodeRequest():
                return await self._activate(message)
            case heartbeat_pb2.SendNodeHeartbeatRequest():
                _bound_heartbeat(message)
            case fab_pb2.GetFabRequest():
                # The SuperLink writes it into its log as it is.
                if not is_object_id(message.hash_str):
                    raise RejectedError(400, "an app without a proper hash")
        return await self._pass_on(name, message)

    async def _pass_on(self, name: str, message: Message) -> Response:
        session = self._session
        return await self._backend.call(
            session.calls, session.owner, self._request, name, message
        )

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
        if response.status >= 400 and self._is_only_connection(
            self._request.connection
        ):
            leave = fleet_pb2.DeactivateNodeRequest(node_id=session.node_id)
            await self._pass_on("deactivate-node", leave)
            response = await self._pass_on("activate-node", message)
        if response.status < 400:
            for question in session.staging.find_unanswered():
                # The server may not wait for it any more.
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
        await self._deliver(staged)

    async def _pull_messages(self, message: fleet_pb2.PullMessagesRequest) -> Response:
        """Return work; hold the call until there is some."""
        session = self._session
        until = time.monotonic() + self._backend.limits.hold_seconds
        mine = session.held_pull = object()
        while True:
            response = await self._pass_on("pull-messages", message)
            if response.status >= 400:
                return response
            given = fleet_pb2.PullMessagesResponse.FromString(response.read_body())
            if given.messages_list:
                session.staging.add_questions(given)
                self._backend.announce_work()
                return _make_response(given, response.headers)
            is_late = session.node_id is None or time.monotonic() >= until
            if is_late or session.held_pull is not mine:
                return response
            await self._backend.wait_for_work()
            if self._request.has_hung_up():  # what is pulled for nobody would be lost
                raise RejectedError(499, "a node that hung up while it waited")

    async def _pull_object(self, message: message_pb2.PullObjectRequest) -> Response:
        name = message.object_id
        question = self._session.staging.find_question_with(name)
        if name in question.inline:
            response = _make_response(
                message_pb2.PullObjectResponse(
                    object_found=True,
                    object_available=True,
                    object_content=question.inline[name],
                )
            )
        else:
            message.run_id = question.metadata.run_id
            response = await self._backend.objects.get(
                name, lambda: self._fetch_object(message)
            )
        question.note_pulled(name, response)
        owner = self._session.owner
        await self._backend.hold_quota(owner, self._request, response.size)
        return response

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

    async def _push_object(self, message: message_pb2.PushObjectRequest) -> Response:
        staged = self._session.staging.find_staged(message)
        if not staged.is_over:
            staged.add_object(message.object_id, message.object_content)
        await self._deliver_if_complete(staged)
        return _make_response(message_pb2.PushObjectResponse(stored=True))

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
        staged.question.is_answered = True
        first = staged.first_push()
        content = await self._send(staged, "push-messages", first)
        response = fleet_pb2.PushMessagesResponse.FromString(content)
        for push in staged.object_pushes(first, response):
            await self._send(staged, "push-object", push)
        staged.free()
        staged.question.inline.clear()

    async def _send(self, staged: StagedReply, name: str, message: Message) -> bytes:
        response = await self._pass_on(name, message)
        if response.status < 400:
            return response.read_body()
        may_retry = response.status >= 500 and staged.tries < _MAX_TRIES
        if not may_retry:
            staged.free()
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
