"""Flower's SuperNode, patched so that a reply leaves as soon as it is whole.

``python -m flwr_safedshb.node.flower_patches.supernode`` is ``flower-supernode`` with
the same options. Flower's main loop pulls a message, waits for the reply and pushes it;
no option changes how it waits:

- It looks for a reply every half second. Here it looks soon, and more rarely the longer
  it takes.
- It begins to push a reply whose objects are missing, and waits for them for ever. A
  process that dies at that moment would take its node along. Here only whole replies
  are pushed, so that an error which follows replaces half a reply.
- It takes an error that comes after a reply for the answer to the next message. Here an
  extra reply is pushed only if nobody works on an answer any more.
- It pulls and pushes every object by a call of its own. Here small ones are inlined.
- httpx closes idle connections after a few seconds. Here they are kept: for a new one
  the node would have to compete with whoever else comes from its address.

Also, and whatever the version, it ends with the process that started it: a SuperNode
that nobody takes tasks from would stay connected, and keep its node from coming back.
"""

from __future__ import annotations

import argparse
import inspect
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import httpx
from flwr.app import Message
from flwr.common.constant import Status
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.runtime_pb2 import PushAppMessagesRequest, PushAppMessagesResponse
from flwr.proto.task_pb2 import Task
from flwr.supercore.object_store import NoObjectInStoreError, ObjectStore
from flwr.supernode import fleet_http_connection as connection
from flwr.supernode import start_client_internal as main_loop
from flwr.supernode.cli import flower_supernode
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.nodestate import NodeState
from flwr.supernode.servicer.runtime import runtime_handlers as handlers

from flwr_safedshb.flower import inline_objects as inlining
from flwr_safedshb.flower.object_tree import walk_tree
from flwr_safedshb.flower.patching import (
    Expectation,
    Patch,
    takes_arguments,
    uses_names,
)

# The pause between two looks for a reply: a share of the time waited, within bounds.
_PAUSE_SHARE, _MIN_PAUSE, _MAX_PAUSE = 0.1, 0.01, 0.5
# Seconds without progress after which half a reply is given up.
_STALLED_SECONDS = 60.0
# Seconds for which an idle connection is kept; the gate keeps it for a little longer.
_KEEP_SECONDS = 100.0
# Messages that are remembered to have been answered.
_MAX_ANSWERED = 64

_UNDER_WAY = (Status.PENDING, Status.STARTING, Status.RUNNING)

Push = Callable[..., None]
Handler = Callable[[PushAppMessagesRequest, NodeState, Task], PushAppMessagesResponse]


class ReplySender:
    """Wait for a whole reply, and let Flower's own function push it.

    Parameters
    ----------
    push : callable
        Flower's function; it asks the state that it is given for replies.
    """

    def __init__(self, push: Push) -> None:
        self._push = push
        self.store: ObjectStore | None = None
        self._answered: deque[str] = deque(maxlen=_MAX_ANSWERED)

    def __call__(
        self, state: NodeState, object_store: ObjectStore, **more: object
    ) -> None:
        """Wait for a reply, and push it."""
        self.store = object_store
        if replies := self._wait_for_replies(state, object_store):
            self._answered += [reply.metadata.reply_to_message_id for reply in replies]
            with_replies = _StateWithReplies(state, replies)
            self._push(state=with_replies, object_store=object_store, **more)

    def _wait_for_replies(self, state: NodeState, store: ObjectStore) -> list[Message]:
        """Return the replies that are whole, or none if it is no use to wait."""
        waiting: list[Message] = []
        extra: list[Message] = []
        began = progress_at = time.monotonic()
        missing = 0
        while True:
            is_idle = bool(extra) and not state.get_tasks(statuses=_UNDER_WAY)
            # To ask for replies also makes Flower answer for processes that are gone.
            for reply in state.get_messages_legacy(is_reply=True):
                answered = reply.metadata.reply_to_message_id in self._answered
                (extra if answered else waiting).append(reply)
            if is_idle and not waiting:
                waiting, extra = extra, []
            counts = [(reply, _count_missing(store, reply)) for reply in waiting]
            whole = [reply for reply, count in counts if not count]
            now = time.monotonic()
            if sum(count for _, count in counts) != missing:
                missing, progress_at = sum(count for _, count in counts), now
            if whole or (waiting and now - progress_at > _STALLED_SECONDS):
                partial = [reply for reply, count in counts if count]
                for reply in [*partial, *extra]:
                    state.delete_messages(message_ids=[reply.metadata.message_id])
                    store.delete(reply.metadata.message_id)
                return whole
            time.sleep(min(max(_PAUSE_SHARE * (now - began), _MIN_PAUSE), _MAX_PAUSE))

    def inline_reply(self, request: PushMessagesRequest) -> PushMessagesRequest:
        """Put the small objects of a reply, which are in the store, into its head."""
        (head,), (tree,) = request.messages_list, request.message_object_trees
        if self.store is not None and not head.HasField("error"):
            names = {part.object_id for part, _ in walk_tree(tree)}
            objects = {name: self.store.get(name) or b"" for name in names}
            small = {
                name: each
                for name, each in objects.items()
                if len(each) <= inlining.MAX_OBJECT_BYTES
                or not each.startswith(b"ArrayChunk")
            }
            inline = inlining.select_inline(tree.object_id, small) or {}
            inlining.attach_inline(head, inline)
        return request


def make_client_class(
    sender: ReplySender, base: type[FleetHttpClient]
) -> type[FleetHttpClient]:
    """Return a subclass of Flower's client that sends and reads inline objects."""

    class InliningFleetClient(base):  # type: ignore[misc,valid-type]
        def __init__(self, *values: object, **more: object) -> None:
            super().__init__(*values, **more)
            inlining.InlineObjectsClient(self, lambda _: None)

        def PushMessages(self, request: PushMessagesRequest) -> PushMessagesResponse:  # noqa: N802
            inlined = sender.inline_reply(request)
            response: PushMessagesResponse = super().PushMessages(inlined)
            return response

    return InliningFleetClient


def wrap_push_handler(push: Handler) -> Handler:
    """Wrap Flower's handler of a worker's reply to store its inline objects."""

    def push_messages(
        request: PushAppMessagesRequest, state: NodeState, task: Task
    ) -> PushAppMessagesResponse:
        inline: inlining.Objects = {}
        for head in request.messages_list:
            inline |= inlining.read_inline(head) or {}
            inlining.remove_inline(head)
        response = push(request, state, task)
        session = response.session_id
        left = [
            name
            for name in response.objects_to_push
            if name not in inline
            or not state.store_object(task.run_id, session, name, inline[name])
        ]
        response.objects_to_push[:] = left
        return response

    return push_messages


class _StateWithReplies:
    """A node's state in which certain replies have just been found."""

    def __init__(self, state: NodeState, replies: list[Message]) -> None:
        self._state, self._replies = state, replies

    def get_messages_legacy(self, *, is_reply: bool) -> list[Message]:
        return self._replies if is_reply else []

    def __getattr__(self, name: str) -> object:
        return getattr(self._state, name)


def _count_missing(store: ObjectStore, reply: Message) -> int:
    """Return how many objects of a reply are still to come."""
    try:
        tree = store.get_object_tree(reply.metadata.message_id)
    except NoObjectInStoreError:
        return 1
    return sum(not store.get(part.object_id) for part, _ in walk_tree(tree))


def default_limits() -> httpx.Limits:
    """Return the limits that all httpx clients of this process share by default."""
    limits = inspect.signature(httpx.Client).parameters["limits"].default
    assert isinstance(limits, httpx.Limits)
    return limits


def _expectations() -> Iterator[Expectation]:
    push, start = main_loop._push_messages, main_loop.start_client_internal
    yield (
        "_push_messages takes state, object_store, send and push_object",
        takes_arguments(push, "state", "object_store", "send", "push_object"),
    )
    yield (
        "it asks the state for replies by get_messages_legacy",
        uses_names(push, "get_messages_legacy"),
    )
    yield (
        "the main loop calls _push_messages",
        uses_names(start, "_push_messages"),
    )
    connect = inspect.unwrap(connection.http_request_response)
    yield (
        "http_request_response makes a FleetHttpClient",
        vars(connection).get("FleetHttpClient") is FleetHttpClient
        and uses_names(connect, "FleetHttpClient"),
    )
    yield (
        "the runtime's push_messages takes request, state and task",
        takes_arguments(handlers.push_messages, "request", "state", "task"),
    )
    yield (
        "httpx shares its default limits",
        isinstance(default_limits().keepalive_expiry, float),
    )


PATCH = Patch(
    target="SuperNode",
    lost="replies leave up to half a second later and object by object, and a worker "
    "that dies while it replies stops the node",
    upstream="a SuperNode that is notified of replies and pushes only whole ones",
    expectations=_expectations,
)


def keep_connections() -> None:
    """Keep idle connections for as long as a step may take."""
    default_limits().keepalive_expiry = _KEEP_SECONDS


def patch_supernode() -> None:
    """Monkeypatch the SuperNode of this process, if it is as expected."""
    if not PATCH.fits():
        return
    sender = ReplySender(main_loop._push_messages)
    vars(main_loop)["_push_messages"] = sender
    vars(connection)["FleetHttpClient"] = make_client_class(sender, FleetHttpClient)
    vars(handlers)["push_messages"] = wrap_push_handler(handlers.push_messages)
    keep_connections()


def end_with_parent() -> None:
    """End this process, as SIGTERM does, when the one that started it has ended.

    The parent states its pid by ``--parent-pid``, for it may be gone before this
    process has looked.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--parent-pid", type=int, default=os.getppid())
    options, sys.argv[1:] = parser.parse_known_args()

    def watch() -> None:
        while os.getppid() == options.parent_pid:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    patch_supernode()
    flower_supernode()
    # Flower's main loop has ended by an error. The thread of its Runtime API has not,
    # and would keep a process that answers nobody.
    os.kill(os.getpid(), signal.SIGTERM)
