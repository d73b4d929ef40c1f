"""A call of the gate: what was asked, over which connection, and why it is refused."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from flwr_safedshb.node.gate.wire import Spool


class RefusedError(Exception):
    """A request that is answered with a status and nothing else; then it ends."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(eq=False)
class Connection:
    """One connection.

    Attributes
    ----------
    owner : str, optional
        The node it belongs to, once that is known.
    shaken : bool
        Whether TLS has shaken hands.
    """

    address: str
    socket: socket.socket
    task: asyncio.Task[None] | None = None
    owner: str | None = None
    calls: int = 0
    shaken: bool = False


@dataclass(eq=False)
class Call:
    """A request whose body has not been read yet.

    Attributes
    ----------
    body : async callable
        Reads the body.
    gone : callable
        Says whether the other side has hung up.
    held : AsyncExitStack
        What is let go of once the call is answered.
    """

    method: str
    path: str
    headers: dict[str, str]
    size: int
    connection: Connection
    body: Callable[[], Awaitable[Spool]]
    gone: Callable[[], bool]
    held: AsyncExitStack
