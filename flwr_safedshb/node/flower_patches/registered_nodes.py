"""The names under which nodes were registered, which `flwr supernode list` omits."""

from __future__ import annotations

import sys
from contextlib import closing, redirect_stdout
from dataclasses import dataclass

from flwr.cli.flower_config import read_superlink_connection
from flwr.cli.utils import init_http_client_from_connection
from flwr.proto.control_pb2 import ListNodesRequest


@dataclass(frozen=True)
class RegisteredNode:
    """A node as the SuperLink knows it: its name, and whether it is online."""

    name: str
    status: str


def list_registered_nodes(superlink: str | None) -> dict[int, RegisteredNode]:
    """Ask a SuperLink for its nodes, by their ids.

    Parameters
    ----------
    superlink : str, optional
        Its name in Flower's configuration; by default the default one.

    Raises
    ------
    ValueError
        If it does not answer.
    """
    import click
    import httpx

    try:
        with redirect_stdout(sys.stderr):  # Flower says which SuperLink it takes
            connection = read_superlink_connection(superlink)
            with closing(init_http_client_from_connection(connection)) as client:
                found = client.ListNodes(ListNodesRequest()).nodes_info
    except (click.ClickException, click.exceptions.Exit, httpx.HTTPError) as error:
        raise ValueError(f"the SuperLink does not answer: {error}") from error
    return {info.node_id: RegisteredNode(info.name, info.status) for info in found}
