"""Grids around other Grids, and one that collects replies whatever they are made of.

A Grid turns the bytes of replies into objects before a strategy sees them, all in one
call. Bytes that are no such objects make that call fail, and the other replies are lost
with it: one client could end a run. `CarefulGrid` collects each reply alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from logging import WARNING

import httpx
from flwr.app import Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from flwr_safedshb.flower.compat import Run, is_flowers_simulation

_POLL_SECONDS = 3.0


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


def innermost(grid: Grid) -> Grid:
    """Return the Grid inside Grids that wrap others."""
    while isinstance(grid, WrappedGrid):
        grid = grid.grid
    return grid


def is_simulated(grid: Grid) -> bool:
    """Whether the nodes are known to be simulated; of other Grids nothing is known."""
    return isinstance(grid, SimulatedGrid) or is_flowers_simulation(grid)


class CarefulGrid(WrappedGrid):
    """A Grid of which one unreadable reply costs no other reply."""

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Send messages and return the replies that came in time and could be read.

        Raises
        ------
        OSError, httpx.HTTPError
            If the network failed rather than a reply.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        # A message that could not be sent has no id.
        pushed = self.grid.push_messages(messages)
        waiting = [message_id for message_id in pushed if message_id]
        replies: list[Message] = []
        while waiting:
            left = []
            for message_id in waiting:
                found = self._pull(message_id)
                if found is not None:
                    replies += found
                    left += [] if found else [message_id]
            if len(left) == len(waiting) and not self._pause(deadline):
                break
            waiting = left
        return replies

    def _pull(self, message_id: str) -> list[Message] | None:
        """Return the reply if it is there, and None if it can never be read."""
        try:
            return list(self.grid.pull_messages([message_id]))
        except (OSError, httpx.HTTPError):
            raise
        except Exception as error:
            log(WARNING, "A reply cannot be read: %s", type(error).__name__)
            return None

    def _pause(self, deadline: float | None) -> bool:
        """Wait before asking again; False if the time is up."""
        interval = float(getattr(self.grid, "pull_interval", _POLL_SECONDS))
        if deadline is not None:
            interval = min(interval, deadline - time.monotonic())
        time.sleep(max(interval, 0.0))
        return interval > 0.0
