"""Grids around other Grids, and whether nodes are simulated."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from flwr_safedshb.flower.compat import Run, is_flowers_simulation


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
    grid = innermost(grid)
    return isinstance(grid, SimulatedGrid) or is_flowers_simulation(grid)
