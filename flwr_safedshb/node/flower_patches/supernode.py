"""Flower's SuperNode, from which a reply leaves as soon as it is whole.

``python -m flwr_safedshb.node.flower_patches.supernode`` is ``flower-supernode`` with
the same options. Its main loop pulls a message, waits for the reply and sends it. That
waiting is done here, for no option changes what Flower does:

- it looks for a reply every half second. Here a look follows soon, and later the longer
  it takes;
- it begins to send a reply of which parts are missing, and waits for them for ever. A
  process that dies at that moment would take its node along. Here only whole replies
  are sent, so an error that follows takes the place of half a reply;
- it takes an error that comes after a reply for the answer to the next message. Here
  what answers nothing is sent only if nobody works on an answer any more;
- it pulls and pushes every object by a call of its own. Here small ones come and go in
  envelopes (`envelope`);
- it sleeps for 3 s after a call for work that brought none. Here it calls every 3 s,
  and at once after a call that the gate has held for longer.

It keeps its connections between calls, for longer than the few seconds of httpx: for a
new one it would have to compete with whoever else comes from its address.

It also ends with the process that started it: a SuperNode that nobody takes tasks from
would stay connected, and keep its node from coming back. Who starts it says its own
number by ``--parent-pid``, for it may be gone before this process has looked.

If Flower's loop is not as it is known here, it runs as it is.
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
from collections.abc import Callable
from logging import WARNING
from types import ModuleType

import httpx
from flwr.app import Message
from flwr.common import log
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

from flwr_safedshb.flower import inline_objects as envelope
from flwr_safedshb.flower.envelope_client import Opener
from flwr_safedshb.flower.fleet import walk

# Between two looks for a reply: a share of the time waited so far, within bounds.
_SHARE, _LEAST, _MOST = 0.1, 0.01, 0.5
# Seconds in which nothing came of half a reply: then nothing will.
_STALLED = 60.0
# Seconds for which a connection is kept; the gate keeps it for a little longer.
_KEPT = 100.0
# Messages that are remembered to have been answered.
_REMEMBERED = 64

_UNDER_WAY = (Status.PENDING, Status.STARTING, Status.RUNNING)

Push = Callable[..., None]
Handler = Callable[[PushAppMessagesRequest, NodeState, Task], PushAppMessagesResponse]


class Clock:
    """What Flower's loop takes for the module `time`: it sleeps between calls only."""

    def __init__(self) -> None:
        self._woke = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep until so many seconds after the end of the last sleep."""
        time.sleep(max(self._woke + seconds - time.monotonic(), 0.0))
        self._woke = time.monotonic()


class Sender:
    """Waits for a whole reply, and lets Flower's own function send it.

    Parameters
    ----------
    push : callable
        Flower's function; it asks the state that it is given for replies.
    """

    def __init__(self, push: Push) -> None:
        self._push = push
        self.store: ObjectStore | None = None
        self._answered: deque[str] = deque(maxlen=_REMEMBERED)

    def __call__(
        self, state: NodeState, object_store: ObjectStore, **more: object
    ) -> None:
        """Wait for a reply, and send it."""
        self.store = object_store
        if found := self._whole(state, object_store):
            self._answered += [reply.metadata.reply_to_message_id for reply in found]
            self._push(state=_Found(state, found), object_store=object_store, **more)

    def _whole(self, state: NodeState, store: ObjectStore) -> list[Message]:
        """Return the replies that are whole, or none if it is no use to wait."""
        waiting: list[Message] = []
        late: list[Message] = []
        began = came = time.monotonic()
        missing = 0
        while True:
            over = bool(late) and not state.get_tasks(statuses=_UNDER_WAY)
            # To ask for replies also makes Flower answer for processes that are gone.
            for reply in state.get_messages_legacy(is_reply=True):
                again = reply.metadata.reply_to_message_id in self._answered
                (late if again else waiting).append(reply)
            if over and not waiting:
                waiting, late = late, []
            left = [(reply, _missing(store, reply)) for reply in waiting]
            whole = [reply for reply, parts in left if not parts]
            now = time.monotonic()
            if sum(parts for _, parts in left) != missing:
                missing, came = sum(parts for _, parts in left), now
            if whole or (waiting and now - came > _STALLED):
                useless = [reply for reply, parts in left if parts]
                for reply in [*useless, *late]:
                    _forget(state, store, reply)
                return whole
            time.sleep(min(max(_SHARE * (now - began), _LEAST), _MOST))

    def sealed(self, request: PushMessagesRequest) -> PushMessagesRequest:
        """Put the small objects of a reply, which are in the store, into its head."""
        (head,), (tree,) = request.messages_list, request.message_object_trees
        if self.store is not None and not head.HasField("error"):
            names = {part.object_id for part, _ in walk(tree)}
            objects = {name: self.store.get(name) or b"" for name in names}
            small = {
                name: each
                for name, each in objects.items()
                if len(each) <= envelope.SMALL or not each.startswith(b"ArrayChunk")
            }
            envelope.seal(head, envelope.chosen(tree.object_id, small) or {})
        return request


def client_of(sender: Sender, kind: type[FleetHttpClient]) -> type[FleetHttpClient]:
    """Return the kind of client that sends and gets messages in envelopes."""

    class Client(kind):  # type: ignore[misc,valid-type]
        def __init__(self, *values: object, **more: object) -> None:
            super().__init__(*values, **more)
            Opener(self, lambda _: None)

        def PushMessages(self, request: PushMessagesRequest) -> PushMessagesResponse:  # noqa: N802
            answer: PushMessagesResponse = super().PushMessages(sender.sealed(request))
            return answer

    return Client


def opening(push: Handler) -> Handler:
    """Return Flower's handler of a worker's reply, with what opens its envelope."""

    def push_messages(
        request: PushAppMessagesRequest, state: NodeState, task: Task
    ) -> PushAppMessagesResponse:
        inside: envelope.Objects = {}
        for head in request.messages_list:
            inside |= envelope.opened(head) or {}
            envelope.empty(head)
        answer = push(request, state, task)
        left = [
            name
            for name in answer.objects_to_push
            if name not in inside
            or not state.store_object(
                task.run_id, answer.session_id, name, inside[name]
            )
        ]
        answer.objects_to_push[:] = left
        return answer

    return push_messages


class _Found:
    """A node's state in which certain replies have just been found."""

    def __init__(self, state: NodeState, replies: list[Message]) -> None:
        self._state, self._replies = state, replies

    def get_messages_legacy(self, *, is_reply: bool) -> list[Message]:
        return self._replies if is_reply else []

    def __getattr__(self, name: str) -> object:
        return getattr(self._state, name)


def _missing(store: ObjectStore, reply: Message) -> int:
    """Return how many objects of a reply are still to come."""
    try:
        tree = store.get_object_tree(reply.metadata.message_id)
    except NoObjectInStoreError:
        return 1
    return sum(not store.get(part.object_id) for part, _ in walk(tree))


def _forget(state: NodeState, store: ObjectStore, reply: Message) -> None:
    state.delete_messages(message_ids=[reply.metadata.message_id])
    store.delete(reply.metadata.message_id)


def is_known(loop: ModuleType) -> bool:
    """Say whether Flower's main loop waits in the ways that are changed here."""
    try:
        push, start = loop._push_messages, loop.start_client_internal
        arguments = push.__code__.co_varnames[: push.__code__.co_argcount]
        return (
            loop.time is time
            and arguments == ("state", "object_store", "send", "push_object")
            and "get_messages_legacy" in push.__code__.co_names
            and "_push_messages" in start.__code__.co_names
            and 3 in start.__code__.co_consts
        )
    except AttributeError:
        return False


def hasten(loop: ModuleType = main_loop) -> Sender | None:
    """Change how the main loop waits."""
    if not is_known(loop):
        log(WARNING, "This SuperNode is not as it is known: replies leave it later")
        return None
    vars(loop)["time"] = Clock()
    sender = vars(loop)["_push_messages"] = Sender(loop._push_messages)
    return sender


def has_known_calls() -> bool:
    """Say whether Flower's SuperNode calls and is called in the ways changed here."""
    try:
        connect = inspect.unwrap(connection.http_request_response).__code__.co_names
        push = handlers.push_messages.__code__
        return (
            vars(connection).get("FleetHttpClient") is FleetHttpClient
            and "FleetHttpClient" in connect
            and push.co_varnames[: push.co_argcount] == ("request", "state", "task")
        )
    except AttributeError:
        return False


def use_envelopes(sender: Sender) -> None:
    """Let small objects come and go in envelopes."""
    if not has_known_calls():
        log(WARNING, "This SuperNode is not as it is known: it makes more calls")
        return
    vars(connection)["FleetHttpClient"] = client_of(sender, FleetHttpClient)
    vars(handlers)["push_messages"] = opening(handlers.push_messages)


def kept_limits() -> httpx.Limits:
    """Return what all clients of this process keep of their connections."""
    limits = inspect.signature(httpx.Client).parameters["limits"].default
    assert isinstance(limits, httpx.Limits)
    return limits


def keep_connections() -> None:
    """Keep connections for as long as a step may take."""
    kept_limits().keepalive_expiry = _KEPT


def end_with_parent() -> None:
    """End this process, as SIGTERM does, when the one that started it has ended."""
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
    keep_connections()
    if (found := hasten()) is not None:
        use_envelopes(found)
    flower_supernode()
