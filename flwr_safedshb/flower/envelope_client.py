"""A client of Flower's that looks for objects in envelopes before it asks for them.

It has the calls of Flower's Runtime and Fleet API by which messages are pulled; both
name them alike. And an object that is not there yet is asked for again soon: Flower
waits for a second.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from flwr.app import Message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    PullObjectRequest,
    PullObjectResponse,
)
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from flwr_safedshb.flower import inline_objects as envelope
from flwr_safedshb.flower.fleet import message_pb2

# Seconds between two questions for an object, and of all of them.
_SOON, _PATIENCE = 0.05, 1.0
# Envelopes that are open at a time.
_MAX_OPEN = 64


class _Opened(NamedTuple):
    """Objects from an envelope, and whether others are kept where it came from."""

    inside: envelope.Objects
    more: bool


class Opener:
    """What is between a client and its calls for messages.

    Parameters
    ----------
    client : RuntimeHttpClient or FleetHttpClient
        Its calls are replaced.
    seen : callable (Message) -> None
        Called with the head of each message that came in an envelope.
    """

    def __init__(
        self, client: Any, seen: Callable[[message_pb2.Message], None]
    ) -> None:
        self._pull_messages = client.PullMessages
        self._pull_object = client.PullObject
        self._confirm = client.ConfirmMessageReceived
        self._seen = seen
        self._open: OrderedDict[str, _Opened] = OrderedDict()
        vars(client).update(
            PullMessages=self.pull_messages,
            PullObject=self.pull_object,
            ConfirmMessageReceived=self.confirm,
        )

    def pull_messages(self, request: Any) -> Any:
        """Collect messages, and open their envelopes."""
        answer = self._pull_messages(request)
        trees = answer.message_object_trees
        for head, tree in zip(answer.messages_list, trees, strict=True):
            inside = envelope.opened(head)
            if inside is None:
                continue
            self._seen(head)
            if inside:
                self._open[tree.object_id] = _Opened(inside, bool(tree.children))
                tree.CopyFrom(envelope.whole_tree(tree.object_id, inside))
                while len(self._open) > _MAX_OPEN:
                    self._open.popitem(last=False)
        return answer

    def pull_object(self, request: PullObjectRequest) -> PullObjectResponse:
        """Return an object: out of an envelope, or as soon as it can be had."""
        for opened in [*self._open.values()]:
            if request.object_id in opened.inside:
                return PullObjectResponse(
                    object_found=True,
                    object_available=True,
                    object_content=opened.inside[request.object_id],
                )
        until = time.monotonic() + _PATIENCE
        while True:
            answer: PullObjectResponse = self._pull_object(request)
            wanted = answer.object_found and not answer.object_available
            if not wanted or time.monotonic() > until:
                return answer
            time.sleep(_SOON)

    def confirm(
        self, request: ConfirmMessageReceivedRequest
    ) -> ConfirmMessageReceivedResponse:
        """Say that a message has come, if any of it is kept where it came from."""
        opened = self._open.pop(request.message_object_id, None)
        if opened is not None and not opened.more:
            return ConfirmMessageReceivedResponse()
        answer: ConfirmMessageReceivedResponse = self._confirm(request)
        return answer


def small_objects(message: Message, known: envelope.Objects) -> envelope.Objects:
    """Return the bytes of a message's objects, without large pieces of arrays.

    Parameters
    ----------
    message : Message
    known : dict of str to bytes
        Objects of other messages; a round's messages share nearly all of them.
    """
    found = {}
    for name, part in get_all_nested_objects(message).items():
        if name not in known:
            if isinstance(part, ArrayChunk) and len(part.data) > envelope.SMALL:
                continue
            known[name] = part.deflate()
        found[name] = known[name]
    return found
