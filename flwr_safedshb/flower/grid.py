"""Grids that wrap other Grids; pulling replies so that none costs another one.

Flower's Grid decodes all replies in one call. Bytes that cannot be decoded make the
whole call fail, and the other replies are lost with it. A reply whose objects never
arrive keeps the call waiting for minutes. A SuperLink may also hold messages that a
node has forged. `FaultTolerantGrid` therefore pulls each reply separately, and accepts
it only if it answers the message that its node was sent.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from logging import WARNING
from queue import Empty, SimpleQueue
from typing import Any

import httpx
from flwr.app import Message
from flwr.common import log
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

from flwr_safedshb.flower.compat import (
    Run,
    is_flower_simulation,
    is_reply_to,
    set_run_id,
)
from flwr_safedshb.flower.patch_grid import patch_grid

# The pause after pulls that brought nothing: as long as they took, or a share of the
# time waited so far, within bounds, so that they do not keep a SuperLink busy.
_PAUSE_SHARE, _MIN_PAUSE, _MAX_PAUSE = 0.02, 0.05, 3.0
# Replies that are pulled at a time, and seconds after which the others go on.
_MAX_BATCH = 8
_BATCH_SECONDS = 0.5
# Times that a SuperLink may fail over one reply.
_MAX_FAILURES = 3


class SimulatedGrid(Grid):
    """A Grid that simulates its nodes here, so that no stranger is among them."""


class WrappedGrid(Grid):
    """Base class: a Grid that passes every call on to the Grid inside it."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    @property
    def run(self) -> Run:
        """Run information."""
        return self.grid.run

    def set_run(self, run: Run) -> None:
        """Set the run."""
        self.grid.set_run(run)

    def create_message(self, *values: Any, **more: Any) -> Message:
        """Create a message."""
        return self.grid.create_message(*values, **more)

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
    """Return True if a Grid is known to simulate its nodes."""
    grid = unwrap_grid(grid)
    return isinstance(grid, SimulatedGrid) or is_flower_simulation(grid)


def has_fixed_nodes(grid: Grid) -> bool:
    """Return True if no node can join a Grid: its nodes are simulated in this process.

    A wrapper that lists nodes itself may list more of them later.
    """
    while isinstance(grid, WrappedGrid):
        if type(grid).get_node_ids is not WrappedGrid.get_node_ids:
            return False
        grid = grid.grid
    return isinstance(grid, SimulatedGrid)


@dataclass(frozen=True)
class Patience:
    """How long the last nodes of a round are waited for.

    Attributes
    ----------
    num_malicious_nodes : int
        f. Once all nodes but f have answered, and more than 2f, a round can take its
        step: whoever is still silent may be an adversary.
    grace : float
        The least seconds from then on. They are as long as the others took, if that is
        longer, so that a node may always be half as fast.
    """

    num_malicious_nodes: int
    grace: float

    def find_deadline(
        self, sent: int, answered: int, start: float, now: float
    ) -> float:
        """Return when a round ends of which `answered` of `sent` replies are there."""
        f = self.num_malicious_nodes
        if answered < max(sent - f, 2 * f + 1):
            return math.inf
        return now + max(self.grace, now - start)


class FaultTolerantGrid(WrappedGrid):
    """Pull replies one by one, so that one unreadable reply cannot lose the others.

    Parameters
    ----------
    grid : Grid
    patience : Patience, optional
        By default all nodes are waited for until the time-out, as simulated ones are.
    """

    def __init__(self, grid: Grid, patience: Patience | None = None) -> None:
        super().__init__(grid)
        self._patience = None if is_simulated(grid) else patience
        patch_grid(unwrap_grid(grid))

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
        sent = self._push(list(messages))
        collector = _ReplyCollector(self.grid, dict(sent))
        is_enough = False
        while collector.waiting:
            began = time.monotonic()
            is_late = began >= deadline
            if collector.poll(everything=is_late):
                if self._patience is not None and not is_enough:
                    ends = self._patience.find_deadline(
                        len(sent), collector.num_answers, start, time.monotonic()
                    )
                    is_enough = math.isfinite(ends)
                    deadline = min(deadline, ends)
                continue
            if is_late:
                break
            now = time.monotonic()
            pause = max(now - began, _PAUSE_SHARE * (now - start))
            pause = min(max(pause, _MIN_PAUSE), _MAX_PAUSE, deadline - now)
            time.sleep(max(pause, 0.0))
        if collector.waiting and is_enough:
            text = "The round ends without %d nodes, %.0f s after it began"
            log(WARNING, text, len(collector.waiting), time.monotonic() - start)
        return collector.replies

    def _push(self, messages: Sequence[Message]) -> dict[str, int]:
        """Push messages; return the ids of those that were sent with their nodes.

        Pushing is idempotent, so what failed together is tried one by one.
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
            message_id: message.metadata.dst_node_id
            for message_id, message in zip(ids, messages, strict=False)
            if message_id
        }

    def _push_alone(self, message: Message) -> str:
        try:
            (message_id,) = self.grid.push_messages([message])
        except (httpx.HTTPStatusError, ObjectPushError, ValueError) as error:
            node = message.metadata.dst_node_id
            log(
                WARNING,
                "Node %d could not be sent its message: %s",
                node,
                _type_name(error),
            )
            return ""
        return message_id


class _ReplyCollector:
    """Pull the replies to messages.

    Attributes
    ----------
    waiting : dict of str to int
        Messages without a reply, and their nodes.
    replies : list of Message
    num_answers : int
        Messages that have a reply which is no error.
    """

    def __init__(self, grid: Grid, sent: dict[str, int]) -> None:
        self._grid = grid
        self.waiting = sent
        self.replies: list[Message] = []
        self.num_answers = 0
        self._busy: set[str] = set()
        self._failures: Counter[str] = Counter()
        self._results: SimpleQueue[tuple[str, list[Message] | Exception]] = (
            SimpleQueue()
        )
        # A simulated reply is there or not: nobody waits for it.
        self._simulated = is_simulated(grid)
        self._batch = 1

    def poll(self, everything: bool) -> bool:
        """Pull replies; return True if one came, or one need not be waited for.

        Replies tend to come together, and a pull costs a SuperLink as much as a reply.
        So one message after the other is asked about until a reply is there; then two
        at a time, then four.
        """
        before = len(self.waiting)
        ids = [each for each in self.waiting if each not in self._busy]
        if not (everything or self._simulated):
            ids = ids[: self._batch]
        for start in range(0, len(ids), _MAX_BATCH):
            batch = ids[start : start + _MAX_BATCH]
            if self._simulated:
                for message_id in batch:
                    self._pull(message_id)
            else:
                self._pull_in_threads(batch)
        with suppress(Empty):
            while True:
                self._accept(*self._results.get_nowait())
        for message_id in ids:
            if message_id in self.waiting:  # the others are first now
                self.waiting[message_id] = self.waiting.pop(message_id)
        came = len(self.waiting) < before
        self._batch = min(2 * self._batch, _MAX_BATCH) if came else 1
        return came

    def _pull_in_threads(self, ids: Sequence[str]) -> None:
        """Pull in threads; one that hangs over a reply is left alone with it."""
        self._busy.update(ids)
        threads = [
            threading.Thread(target=self._pull, args=(message_id,), daemon=True)
            for message_id in ids
        ]
        for thread in threads:
            thread.start()
        until = time.monotonic() + _BATCH_SECONDS
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.0))

    def _pull(self, message_id: str) -> None:
        try:
            found = list(self._grid.pull_messages([message_id]))
            self._results.put((message_id, found))
        except Exception as error:
            self._results.put((message_id, error))

    def _accept(self, message_id: str, result: list[Message] | Exception) -> None:
        self._busy.discard(message_id)
        node = self.waiting.get(message_id)
        if node is None:
            return
        if isinstance(result, Exception):
            self._handle_failure(message_id, node, result)
            return
        # A reply that answers nothing is handed on as well, to be counted, and waited
        # on: the true reply may still come, but not from a node that is simulated.
        self.replies += result
        answers = [reply for reply in result if is_reply_to(reply, message_id, node)]
        if answers or (result and self._simulated):
            self.num_answers += not all(reply.has_error() for reply in answers)
            del self.waiting[message_id]

    def _handle_failure(self, message_id: str, node: int, error: Exception) -> None:
        """Give a reply up, after a few tries if it was the SuperLink that failed."""
        if isinstance(error, httpx.HTTPStatusError):
            self._failures[message_id] += 1
            if self._failures[message_id] < _MAX_FAILURES:
                return
        elif isinstance(error, OSError | httpx.TransportError):
            raise error
        log(WARNING, "The reply of node %d cannot be read: %s", node, _type_name(error))
        self.waiting.pop(message_id, None)


def _type_name(error: Exception) -> str:
    return type(error).__name__
