"""Run the apps of the examples in this process, each with its own modules."""

import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict

from flwr_safedshb.grids.in_process import InProcessGrid

EXAMPLES = Path(__file__).parents[1] / "examples"
MODULES = ("client_app", "server_app", "task", "app")


@contextmanager
def app_in(folder: Path) -> Iterator[tuple[Any, Any]]:
    """Yield ServerApp and ClientApp as the app's pyproject.toml names them."""
    about = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]
    components = about["app"]["components"]
    sys.path.insert(0, str(folder))
    try:
        apps = []
        for side in ("serverapp", "clientapp"):
            module, _, name = components[side].partition(":")
            apps.append(getattr(import_module(module), name))
        yield apps[0], apps[1]
    finally:
        sys.path.remove(str(folder))
        for module in MODULES:
            sys.modules.pop(module, None)


def run_app(folder: Path, nodes: int, **config: object) -> None:
    """Run an app with its own config, but for what is given here."""
    about = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]
    changes = {name.replace("_", "-"): value for name, value in config.items()}
    settings = {**about["app"]["config"], **changes}
    with app_in(folder) as (server, client):
        grid = InProcessGrid(client, nodes, run_config=settings)
        server(grid, Context(1, 1, {}, RecordDict(), settings))
