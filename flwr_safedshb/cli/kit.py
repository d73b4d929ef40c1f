"""Write the deployment kit into a folder: credentials, a node's file, services.

For example:
  safedshb kit ~/federation/kit
  ~/federation/kit/credentials.sh ca ~/federation/server
"""

from __future__ import annotations

import argparse
import shutil
from importlib import resources
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("folder", type=Path, help="is made, and must not be there")


def run(arguments: argparse.Namespace) -> int:
    """Copy the files; 2 if the folder is there already."""
    folder: Path = arguments.folder
    if folder.exists():
        raise ValueError(f"{folder} exists and is not overwritten")
    with resources.as_file(resources.files("flwr_safedshb.deployment")) as room:
        junk = shutil.ignore_patterns("__pycache__")
        shutil.copytree(room / "kit", folder, ignore=junk)
    # A wheel does not keep what may be executed.
    (folder / "credentials.sh").chmod(0o755)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            print(path)
    return 0
