"""Run the apps of the examples, each with its own modules, here or on Ray."""

import os
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from flwr_safedshb.simulation.in_process import InProcessGrid
from simulations.engines import simulate

EXAMPLES = Path(__file__).parents[1] / "examples"


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
        for name, module in [*sys.modules.items()]:
            if str(getattr(module, "__file__", "")).startswith(f"{folder}{os.sep}"):
                del sys.modules[name]


def settings_of(folder: Path, **changes: object) -> dict[str, Any]:
    """Return an app's own config, but for what is given here."""
    about = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]
    given = {name.replace("_", "-"): value for name, value in changes.items()}
    return {**about["app"]["config"], **given}


def run_app(folder: Path, nodes: int, **config: object) -> None:
    """Run an app in this process, with its own config but for what is given here."""
    settings = settings_of(folder, **config)
    with app_in(folder) as (server, client):
        serve(server, InProcessGrid(client, nodes, run_config=settings), settings)


def serve(server: Any, grid: Grid, settings: dict[str, Any]) -> None:
    """Run a ServerApp, its first model the same wherever it runs."""
    torch.manual_seed(0)
    server(grid, Context(1, 1, {}, RecordDict(), settings))


class WhicheverRuns(ClientApp):
    """The ClientApp of the app whose folder a file names, on a worker of Ray."""

    def __init__(self, current: Path) -> None:
        super().__init__()
        self.current = current

    def __call__(self, message: Message, context: Context) -> Message:
        folder = Path(self.current.read_text())
        node = context.run_id, context.node_id, context.node_config, context.state
        reply: Message = _client(folder)(message, Context(*node, settings_of(folder)))
        return reply


@cache  # as a worker does: an app is loaded once, and keeps its model
def _client(folder: Path) -> Any:
    with app_in(folder) as (_, client):
        return client


def run_on_ray(runs: dict[Path, dict[str, object]], nodes: int, current: Path) -> None:
    """Run apps one after the other on one start of Flower's simulation engine.

    A start takes longer than all their rounds. The server says in the file `current`
    which app it is at.
    """
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        for folder, config in runs.items():
            current.write_text(str(folder))
            with app_in(folder) as (own, _):
                serve(own, grid, settings_of(folder, **config))

    simulate(server, WhicheverRuns(current), nodes, os.cpu_count() or 1)
