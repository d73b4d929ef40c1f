"""Flower's Grid of a SuperLink, which sends and gets messages in envelopes.

A reply in an envelope says that its node, or the gate of that node, understands them.
From then on the messages to that node are sent in one. A node whose last reply was not
in one is asked as Flower does, as all are in the first round.

If Flower's Grid is not as it is known here, it is used as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from flwr.app import Message
from flwr.proto.runtime_pb2 import PushAppMessagesRequest, PushAppMessagesResponse
from flwr.serverapp import Grid

from flwr_safedshb.flower import inline_objects as envelope
from flwr_safedshb.flower.envelope_client import Opener, small_objects
from flwr_safedshb.flower.fleet import message_pb2

if TYPE_CHECKING:
    from flwr.superlink.grid.http_grid import HttpGrid

_GRIDS = "flwr.superlink.grid"

Push = Callable[[int, Sequence[Message]], list[str]]


class Envelopes:
    """What is between a Grid and its calls of the SuperLink.

    Parameters
    ----------
    grid : HttpGrid
    """

    def __init__(self, grid: HttpGrid) -> None:
        client = grid._runtime_client
        Opener(client, self._seen)
        self._try_push: Push = grid._try_push_messages
        self._push_messages = client.PushMessages
        self._messages: dict[str, Message] = {}
        # Nodes that understand envelopes, as far as is known.
        self._understood: set[int] = set()
        vars(grid)["_try_push_messages"] = self.try_push
        vars(client)["PushMessages"] = self.push_messages

    def _seen(self, head: message_pb2.Message) -> None:
        self._understood.add(head.metadata.src_node_id)

    def try_push(self, run_id: int, messages: Sequence[Message]) -> list[str]:
        """Push messages; Flower calls this where it computes no id twice."""
        self._messages = {
            message.metadata.message_id: message
            for message in messages
            if message.metadata.dst_node_id in self._understood
        }
        # Until the next reply: a node may come back without its gate.
        self._understood -= {m.metadata.dst_node_id for m in messages}
        try:
            return self._try_push(run_id, messages)
        finally:
            self._messages = {}

    def push_messages(self, request: PushAppMessagesRequest) -> PushAppMessagesResponse:
        """Register messages, each in an envelope if its node is known to open it."""
        known: envelope.Objects = {}
        sealed = set()
        trees = request.message_object_trees
        for head, tree in zip(request.messages_list, trees, strict=True):
            message = self._messages.get(head.metadata.message_id)
            if message is None or not message.has_content():
                continue
            objects = small_objects(message, known)
            if inside := envelope.chosen(tree.object_id, objects):
                envelope.seal(head, inside)
                tree.CopyFrom(envelope.outer_tree(tree, inside))
                sealed.add(tree.object_id)
        answer = self._push_messages(request)
        left = [name for name in answer.objects_to_push if name not in sealed]
        answer.objects_to_push[:] = left
        return answer


def patch(grid: Grid) -> None:
    """Change how a Grid asks its SuperLink, if it is one that does, and once."""
    if _GRIDS not in sys.modules:
        return
    known = getattr(import_module(_GRIDS), "HttpGrid", None)
    if known is None or type(grid) is not known or "_try_push_messages" in vars(grid):
        return
    if is_known(known):
        Envelopes(grid)  # type: ignore[arg-type]


def is_known(kind: type[Any]) -> bool:
    """Say whether Flower's Grid pushes and pulls in the ways that are changed here."""
    try:
        push, pull = kind._try_push_messages.__code__, kind.pull_messages.__code__
        return (
            push.co_varnames[: push.co_argcount] == ("self", "run_id", "messages")
            and {"PushMessages", "PushObject", "objects_to_push"} <= {*push.co_names}
            and {"PullMessages", "message_object_trees"} <= {*pull.co_names}
            and isinstance(kind._runtime_client, property)
        )
    except AttributeError:
        return False
