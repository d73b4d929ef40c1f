"""Flower's older API: clients behind a ClientManager."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import Message
from flwr.server import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.serverapp import Grid

__all__ = ["ClientManagerGrid", "ClientProxy", "find_grid"]


class ClientManagerGrid(Grid):
    """A Grid to choose nodes of a ClientManager from; the server itself sends."""

    def __init__(self, client_manager: ClientManager) -> None:
        self._manager = client_manager

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes: the cids of their proxies."""
        return [int(cid) for cid in self._manager.all()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Refuse: the server sends its messages itself."""
        raise NotImplementedError("the server sends its messages itself")

    pull_messages = send_and_receive = push_messages  # type: ignore[assignment]
    set_run = create_message = run = None  # type: ignore[assignment]


def find_grid(client_manager: ClientManager) -> Grid | None:
    """Return the Grid that the clients are reached by; None if it is not known."""
    for proxy in client_manager.all().values():
        grid = getattr(proxy, "grid", None)
        return grid if isinstance(grid, Grid) else None
    return None
