"""A Grid whose replies are believed one by one.

A Grid turns the bytes of replies into objects before a strategy sees them, all in one
call. Bytes that are no such objects make that call fail, and the other replies are lost
with it; and a reply of which a part never comes is waited for, in that same call, for
minutes. A SuperLink may also hold messages that a node has forged. So `CarefulGrid`
collects each reply alone, and takes it for an answer only if it answers what was asked
of the node that it comes from.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from logging import WARNING
from queue import Empty, SimpleQueue

import httpx
from flwr.app import Message
from flwr.common import log
from flwr.serverapp import Grid

from flwr_safedshb.flower.compat import SUPERLINK_NODE_ID
from flwr_safedshb.flower.grid import WrappedGrid, is_simulated

# Between two rounds of questions: a few times what one takes, within these bounds, so
# that many nodes do not keep a SuperLink busy with questions.
_PAUSE_RATIO = 3.0
_LEAST_PAUSE, _MOST_PAUSE = 0.05, 3.0
# Replies that are collected at a time, and seconds after which the others go on.
_AT_A_TIME = 8
_PATIENCE = 2.0
# Times that a SuperLink may fail over one reply.
_MAX_FAILURES = 3


def answers(reply: Message, message_id: str, node: int) -> bool:
    """Whether a reply answers a message, and comes from the node that was asked.

    That a node was lost is said by the SuperLink.
    """
    about = reply.metadata
    if about.reply_to_message_id != message_id:
        return False
    lost = reply.has_error() and about.src_node_id == SUPERLINK_NODE_ID
    return about.src_node_id == node or lost


class CarefulGrid(WrappedGrid):
    """A Grid of which no reply costs another reply."""

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Send messages and return the replies that came in time and could be read.

        A message that could not be sent has no reply.

        Raises
        ------
        OSError, httpx.TransportError
            If the network failed rather than a reply.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        asked = self._push(list(messages))
        collection = _Collection(self.grid, asked)
        while collection.waiting:
            began = time.monotonic()
            if collection.sweep():
                continue
            pause = _PAUSE_RATIO * (time.monotonic() - began)
            pause = min(max(pause, _LEAST_PAUSE), _MOST_PAUSE)
            if deadline is not None:
                pause = min(pause, deadline - time.monotonic())
            if pause <= 0.0:
                break
            time.sleep(pause)
        return collection.replies

    def _push(self, messages: Sequence[Message]) -> dict[str, int]:
        """Send messages, and return the ids of those that were sent with their nodes.

        The same bytes may be sent twice, so what failed together is tried one by one.
        """
        try:
            ids = list(self.grid.push_messages(messages))
        except httpx.HTTPStatusError as error:
            log(WARNING, "Messages could not be sent at once: %s", error)
            ids = [self._push_alone(message) for message in messages]
        return {
            name: message.metadata.dst_node_id
            for name, message in zip(ids, messages, strict=False)
            if name
        }

    def _push_alone(self, message: Message) -> str:
        try:
            (name,) = self.grid.push_messages([message])
        except (httpx.HTTPStatusError, ValueError) as error:
            node = message.metadata.dst_node_id
            log(WARNING, "Node %d could not be asked: %s", node, type(error).__name__)
            return ""
        return name


class _Collection:
    """Replies to come.

    Attributes
    ----------
    waiting : dict of str to int
        Messages without a reply, and their nodes.
    replies : list of Message
    """

    def __init__(self, grid: Grid, asked: dict[str, int]) -> None:
        self._grid = grid
        self.waiting = asked
        self.replies: list[Message] = []
        self._busy: set[str] = set()
        self._failures: dict[str, int] = {}
        self._found: SimpleQueue[tuple[str, list[Message] | Exception]] = SimpleQueue()
        # What is simulated in this process is there or not; it is not waited for.
        self._alone = is_simulated(grid)

    def sweep(self) -> bool:
        """Ask once for every reply; True if one came, or one need not be waited for."""
        before = len(self.waiting)
        ids = [name for name in self.waiting if name not in self._busy]
        for start in range(0, len(ids), _AT_A_TIME):
            part = ids[start : start + _AT_A_TIME]
            if self._alone:
                for name in part:
                    self._pull(name)
            else:
                self._pull_together(part)
        while True:
            try:
                self._take(*self._found.get_nowait())
            except Empty:
                return len(self.waiting) < before

    def _pull_together(self, names: Sequence[str]) -> None:
        """Ask in threads; one that hangs over a reply is left alone with it."""
        self._busy.update(names)
        threads = [
            threading.Thread(target=self._pull, args=(name,), daemon=True)
            for name in names
        ]
        for thread in threads:
            thread.start()
        until = time.monotonic() + _PATIENCE
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.0))

    def _pull(self, name: str) -> None:
        try:
            self._found.put((name, list(self._grid.pull_messages([name]))))
        except Exception as error:
            self._found.put((name, error))

    def _take(self, name: str, found: list[Message] | Exception) -> None:
        self._busy.discard(name)
        node = self.waiting.get(name)
        if node is None:
            return
        if isinstance(found, Exception):
            self._failed(name, node, found)
            return
        # What answers nothing is handed on as well, to be counted, and waited on: the
        # true reply may still come, but not from a node that is simulated.
        self.replies += found
        if any(answers(reply, name, node) for reply in found) or (
            found and self._alone
        ):
            del self.waiting[name]

    def _failed(self, name: str, node: int, error: Exception) -> None:
        if isinstance(error, httpx.HTTPStatusError):
            self._failures[name] = self._failures.get(name, 0) + 1
            if self._failures[name] < _MAX_FAILURES:
                return
        elif isinstance(error, OSError | httpx.TransportError):
            raise error
        log(WARNING, "No reply of node %d can be read: %s", node, type(error).__name__)
        self.waiting.pop(name, None)
