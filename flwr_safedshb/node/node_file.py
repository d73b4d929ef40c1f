"""The one file of a node: its config, its policy, and how it reaches the federation.

Everything but the table ``[supernode]`` is the node's config, as Flower hands it to
clients; the table says where the SuperLink is and which key is the node's.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from flwr.app import UserConfig

from flwr_safedshb.flower.compat import flatten_config

TABLE = "supernode"
_REQUIRED, _OPTIONAL = ("superlink", "root-certificates", "key"), "trusted-entities"


@dataclass(frozen=True)
class SuperLinkConnection:
    """How a node reaches the federation.

    Attributes
    ----------
    superlink : str
        The address of the gate, host:port.
    root_certificates : Path
        What the gate's certificate must be signed by.
    key : Path
        The node's private key.
    trusted_entities : Path, optional
        Flower's file of those whose signatures on apps are trusted.
    """

    superlink: str
    root_certificates: Path
    key: Path
    trusted_entities: Path | None = None


@dataclass(frozen=True)
class NodeFile:
    """What a node's file states."""

    path: Path
    config: UserConfig
    connection: SuperLinkConnection | None


def read_node_file(path: Path) -> NodeFile:
    """Read a node's file.

    Raises
    ------
    ValueError
        Naming what cannot be understood.
    """
    try:
        content = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is no TOML file: {error}") from error
    table = content.pop(TABLE, None)
    connection = None if table is None else _parse_connection(path, table)
    config = flatten_config(content)
    if connection is not None and config.get("sandbox") is not True:
        # A node signs receipts with the key that the SuperLink knows it by. Workers do
        # that, so one that is confined makes a key of its own, beside the ledger.
        config.setdefault("receipt-key", str(connection.key))
    return NodeFile(path, config, connection)


def _parse_connection(path: Path, table: object) -> SuperLinkConnection:
    given = dict(table) if isinstance(table, dict) else {}
    unknown = sorted({*given} - {*_REQUIRED, _OPTIONAL})
    missing = [key for key in _REQUIRED if not isinstance(given.get(key), str)]
    if unknown or missing:
        problem = (
            f"does not know {unknown[0]!r}" if unknown else f"needs {missing[0]!r}"
        )
        raise ValueError(
            f"[{TABLE}] of {path} {problem}: it has {', '.join(_REQUIRED)}, and may "
            f"have {_OPTIONAL}, each a string"
        )
    base = path.absolute().parent
    paths = {
        key.replace("-", "_"): base / Path(str(value)).expanduser()
        for key, value in given.items()
        if key != "superlink"
    }
    return SuperLinkConnection(given["superlink"], **paths)
