"""Grids that wrap other Grids, and whether the nodes behind a Grid are simulated.

Flower's Grid turns the bytes of all replies into objects in one call. Bytes that are no
such objects make the whole call fail, and the other replies are lost with it. A reply
that never arrives completely keeps the call waiting for minutes. A SuperLink may also
hold messages that a node has forged. `FaultTolerantGrid` therefore pulls each reply
separately, and accepts it only if it answers the message that its node was sent.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Sequence
from logging import WARNING
from queue import Empty, SimpleQueue

import httpx
from flwr.app import Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

from flwr_safedshb.flower import patch_grid as superlink
from flwr_safedshb.flower.compat import (
    Run,
    is_flower_simulation,
    is_reply_to,
    set_run_id,
)

# Between two questions that nothing came of: as long as one takes, or a share of
# the time waited so far, within these bounds: they must not keep a SuperLink busy.
_PAUSE_RATIO, _PAUSE_SHARE = 1.0, 0.02
_LEAST_PAUSE, _MOST_PAUSE = 0.05, 3.0
# Replies that are collected at a time, and seconds after which the others go on.
_AT_A_TIME = 8
_PATIENCE = 0.5
# Times that a SuperLink may fail over one reply.
_MAX_FAILURES = 3


class SimulatedGrid(Grid):
    """A Grid whose nodes are simulated here, so that no stranger is among them."""


class WrappedGrid(Grid):
    """A Grid that does what the Grid inside it does."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    @property
    def run(self) -> Run:
        """Run information."""
        return self.grid.run

    def set_run(self, run: Run) -> None:
        """Set the run."""
        self.grid.set_run(run)

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message."""
        return self.grid.create_message(
            content, message_type, dst_node_id, group_id, ttl
        )

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes."""
        return self.grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages."""
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Collect the replies that have come."""
        return self.grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and wait for their replies."""
        return self.grid.send_and_receive(messages, timeout=timeout)


def unwrap_grid(grid: Grid) -> Grid:
    """Return the Grid inside Grids that wrap others."""
    while isinstance(grid, WrappedGrid):
        grid = grid.grid
    return grid


def is_simulated(grid: Grid) -> bool:
    """Whether the nodes are known to be simulated; of other Grids nothing is known."""
    grid = unwrap_grid(grid)
    return isinstance(grid, SimulatedGrid) or is_flower_simulation(grid)


class FaultTolerantGrid(WrappedGrid):
    """Pull replies one by one, so that one unreadable reply cannot lose the others."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        superlink.patch(unwrap_grid(grid))

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
        start = time.monotonic()
        deadline = math.inf if timeout is None else start + timeout
        asked = self._push(list(messages))
        collection = _Collection(self.grid, asked)
        while collection.waiting:
            began = time.monotonic()
            over = began >= deadline
            if collection.ask(everything=over):
                continue
            if over:
                break
            now = time.monotonic()
            pause = max(_PAUSE_RATIO * (now - began), _PAUSE_SHARE * (now - start))
            pause = min(max(pause, _LEAST_PAUSE), _MOST_PAUSE, deadline - now)
            time.sleep(max(pause, 0.0))
        return collection.replies

    def _push(self, messages: Sequence[Message]) -> dict[str, int]:
        """Send messages, and return the ids of those that were sent with their nodes.

        The same bytes may be sent twice, so what failed together is tried one by one.
        """
        run_id = self.run.run_id
        for message in messages:
            set_run_id(message, run_id)
        try:
            ids = list(self.grid.push_messages(messages))
        except (httpx.HTTPStatusError, ObjectPushError) as error:
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
        except (httpx.HTTPStatusError, ObjectPushError, ValueError) as error:
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
        self._eager = 1

    def ask(self, everything: bool) -> bool:
        """Ask for replies; True if one came, or one need not be waited for.

        Replies come together, and a question costs a SuperLink as much as a reply. So
        one of them is asked for, in turn, until it is there; then two, then four.
        """
        before = len(self.waiting)
        ids = [name for name in self.waiting if name not in self._busy]
        if not (everything or self._alone):
            ids = ids[: self._eager]
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
                break
        for name in ids:
            if name in self.waiting:  # the others are first now
                self.waiting[name] = self.waiting.pop(name)
        came = len(self.waiting) < before
        self._eager = min(2 * self._eager, _AT_A_TIME) if came else 1
        return came

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
        if any(is_reply_to(reply, name, node) for reply in found) or (
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
