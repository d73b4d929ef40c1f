"""Load a Flower app's client for the doctor, as a SuperNode would."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from flwr.app import Context, RecordDict, UserConfig, UserConfigValue
from flwr.clientapp import ClientApp

from flwr_safedshb.app import ClientFn, PrivateClientApp, to_private_client
from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.flower.compat import flatten_config


def read_app(folder: Path) -> tuple[str, UserConfig]:
    """Read the ClientApp reference and the default run config of a Flower app."""
    path = folder / "pyproject.toml"
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no {path}; name the folder of a Flower app with --app, or a "
            "client with --client module:object"
        )
    try:
        app = tomllib.loads(path.read_text())["tool"]["flwr"]["app"]
        component = str(app["components"]["clientapp"])
    except (KeyError, TypeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path} names no clientapp of a Flower app") from error
    return component, flatten_config(app.get("config", {}))


def load_client_fn(name: str, folder: Path) -> ClientFn:
    """Load a client_fn, either itself or from an app made by `client_app`.

    Parameters
    ----------
    name : str
        ``module:object``
    folder : Path
        The folder in which modules are searched first.
    """
    module_name, _, object_name = name.partition(":")
    if not module_name or not object_name:
        raise ValueError(f"client={name!r} must be module:object")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        found = getattr(importlib.import_module(module_name), object_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"client={name!r} cannot be loaded: {error}") from error
    if isinstance(found, PrivateClientApp):
        return found.client_fn
    if isinstance(found, ClientApp):
        raise ValueError(
            f"client={name!r} is a ClientApp not made by client_app; name its "
            "client_fn instead"
        )
    if not callable(found):
        raise ValueError(f"client={name!r} is {type(found).__name__}, not a client_fn")
    return cast(ClientFn, found)


def make_client(
    client_fn: ClientFn,
    node_config: Mapping[str, UserConfigValue],
    run_config: Mapping[str, UserConfigValue],
) -> SafeDSHBClient:
    """Make the client that a SuperNode with this config would make."""
    context = Context(0, 0, dict(node_config), RecordDict(), dict(run_config))
    return to_private_client(client_fn(context))
