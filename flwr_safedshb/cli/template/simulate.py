"""Run the app in this process, on made-up data: python simulate.py."""

import tomllib
from pathlib import Path

from new_app.client_app import app as client
from new_app.server_app import app as server

from flwr_safedshb import InProcessGrid


def main() -> None:
    """Train with the settings of pyproject.toml."""
    project = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text())
    config = project["tool"]["flwr"]["app"]["config"]
    grid = InProcessGrid(client, config["num-nodes"], run_config=config)
    server(grid, grid.server_context())


if __name__ == "__main__":
    main()
