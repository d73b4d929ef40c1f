"""The patch of Flower's HttpGrid: small objects travel inline, in the message's head.

A reply with inline objects says that its node, or the gate before it, reads them. The
next message to that node is sent with them. Every other node is asked as Flower does,
as all are in the first round.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from flwr.app import Message
from flwr.proto.runtime_pb2 import PushAppMessagesRequest, PushAppMessagesResponse
from flwr.serverapp import Grid

from flwr_safedshb.flower.inline_objects import (
    InlineObjectsClient,
    Objects,
    attach_inline,
    deflate_small_objects,
    prune_tree,
    select_inline,
)
from flwr_safedshb.flower.object_tree import message_pb2
from flwr_safedshb.flower.patching import (
    Expectation,
    Patch,
    takes_arguments,
    uses_names,
)

if TYPE_CHECKING:
    from flwr.superlink.grid.http_grid import HttpGrid

_GRIDS = "flwr.superlink.grid"

Push = Callable[[int, Sequence[Message]], list[str]]


def patch_grid(grid: Grid) -> None:
    """Monkeypatch an HttpGrid to inline small objects.

    Idempotent, and a no-op for other Grids.
    """
    if _GRIDS not in sys.modules:  # half a second to import, and nobody has one
        return
    kind = getattr(import_module(_GRIDS), "HttpGrid", None)
    if type(grid) is kind and "_try_push_messages" not in vars(grid) and PATCH.fits():
        _InlinePush(grid)  # type: ignore[arg-type]


class _InlinePush:
    """Replace an HttpGrid's calls of its SuperLink."""

    def __init__(self, grid: HttpGrid) -> None:
        client = grid._runtime_client
        InlineObjectsClient(client, self._note_reply)
        self._try_push: Push = grid._try_push_messages
        self._push_messages = client.PushMessages
        self._messages: dict[str, Message] = {}
        # Nodes that are known to read inline objects.
        self._readers: set[int] = set()
        vars(grid)["_try_push_messages"] = self.try_push
        vars(client)["PushMessages"] = self.push_messages

    def _note_reply(self, head: message_pb2.Message) -> None:
        self._readers.add(head.metadata.src_node_id)

    def try_push(self, run_id: int, messages: Sequence[Message]) -> list[str]:
        """Push messages, whose ids Flower has set."""
        self._messages = {
            message.metadata.message_id: message
            for message in messages
            if message.metadata.dst_node_id in self._readers
        }
        # Until the next reply: a node may come back without its gate.
        self._readers -= {m.metadata.dst_node_id for m in messages}
        try:
            return self._try_push(run_id, messages)
        finally:
            self._messages = {}

    def push_messages(self, request: PushAppMessagesRequest) -> PushAppMessagesResponse:
        """Register messages, with inline objects where the node reads them."""
        known: Objects = {}
        roots = set()
        trees = request.message_object_trees
        for head, tree in zip(request.messages_list, trees, strict=True):
            message = self._messages.get(head.metadata.message_id)
            if message is None or not message.has_content():
                continue
            objects = deflate_small_objects(message, known)
            if inline := select_inline(tree.object_id, objects):
                attach_inline(head, inline)
                tree.CopyFrom(prune_tree(tree, inline))
                roots.add(tree.object_id)
        answer = self._push_messages(request)
        # The root is never pushed by itself: nobody asks for it.
        left = [name for name in answer.objects_to_push if name not in roots]
        answer.objects_to_push[:] = left
        return answer


def _expectations() -> Iterator[Expectation]:
    kind: Any = import_module(_GRIDS).HttpGrid
    push, pull = kind._try_push_messages, kind.pull_messages
    yield (
        "HttpGrid._try_push_messages takes run_id and messages",
        takes_arguments(push, "self", "run_id", "messages"),
    )
    yield (
        "it calls PushMessages and PushObject",
        uses_names(push, "PushMessages", "PushObject", "objects_to_push"),
    )
    yield (
        "HttpGrid.pull_messages reads object trees",
        uses_names(pull, "PullMessages", "message_object_trees"),
    )
    yield (
        "HttpGrid._runtime_client is a property",
        isinstance(kind._runtime_client, property),
    )


PATCH = Patch(
    target="HttpGrid",
    lost="every object of a message is a call of its own, so rounds take longer",
    upstream="batched object transfer in the Runtime and Fleet APIs",
    expectations=_expectations,
)
