"""The one file of a node: its config, its floor, and how it reaches the federation.

Everything but the table ``[supernode]`` is the node's config, as Flower hands it to
clients; the table says where the SuperLink is and which key is the node's.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from flwr.app import UserConfig

from flwr_safedshb.flower.compat import flatten_config

TABLE = "supernode"


@dataclass(frozen=True)
class Connection:
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
    """What a node's file says."""

    path: Path
    config: UserConfig
    connection: Connection | None


def read(path: Path) -> NodeFile:
    """Read a node's file.

    Raises
    ------
    ValueError
        Naming what cannot be understood.
    """
    try:
        found = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is no TOML file: {error}") from error
    table = found.pop(TABLE, None)
    connection = None if table is None else _connection(path, table)
    return NodeFile(path, flatten_config(found), connection)


def _connection(path: Path, table: object) -> Connection:
    keys = [field.name.replace("_", "-") for field in fields(Connection)]
    given = dict(table) if isinstance(table, dict) else {}
    unknown = sorted({*given} - {*keys})
    missing = [key for key in keys[:3] if not isinstance(given.get(key), str)]
    if unknown or missing:
        problem = (
            f"does not know {unknown[0]!r}" if unknown else f"needs {missing[0]!r}"
        )
        raise ValueError(
            f"[{TABLE}] of {path} {problem}: it has {', '.join(keys[:3])}, and may "
            f"have {keys[3]}, each a text"
        )
    entities = given.get("trusted-entities")
    base = path.absolute().parent
    return Connection(
        given["superlink"],
        base / Path(given["root-certificates"]).expanduser(),
        base / Path(given["key"]).expanduser(),
        None if entities is None else base / Path(str(entities)).expanduser(),
    )
