"""What is particular to apps of Flower's older kind: clients behind a manager."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import Message
from flwr.server import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.serverapp import Grid

__all__ = ["ClientManagerGrid", "ClientProxy", "find_grid"]


class ClientManagerGrid(Grid):
    """The nodes of a ClientManager, to choose from; the server itself sends."""

    def __init__(self, client_manager: ClientManager) -> None:
        self._manager = client_manager

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes, which are the names of their proxies."""
        return [int(cid) for cid in self._manager.all()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send nothing."""
        raise NotImplementedError("the server sends its messages itself")

    pull_messages = send_and_receive = push_messages  # type: ignore[assignment]
    set_run = create_message = run = None  # type: ignore[assignment]


def find_grid(client_manager: ClientManager) -> Grid | None:
    """Return the network that the clients are reached by, if that is known."""
    for proxy in client_manager.all().values():
        grid = getattr(proxy, "grid", None)
        return grid if isinstance(grid, Grid) else None
    return None
