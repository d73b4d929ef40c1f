"""Write the deployment kit into a folder: credentials, a node's file, services.

For example:
  safedshb kit ~/federation/kit
  ~/federation/kit/credentials.sh ca ~/federation/server
"""

from __future__ import annotations

import argparse
from functools import partial
from importlib import resources
from pathlib import Path
from typing import BinaryIO

from flwr_safedshb.atomic_io import replace_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", type=Path, help="a new folder")


def run(arguments: argparse.Namespace) -> int:
    """Copy the files; 2 if the folder is there already."""
    folder: Path = arguments.folder
    if folder.exists():
        raise ValueError(f"{folder} exists and is not overwritten")
    with resources.as_file(resources.files("flwr_safedshb.node")) as room:
        sources = [p for p in sorted((room / "template").rglob("*")) if p.is_file()]
        for source in sources:
            if "__pycache__" in source.parts:
                continue
            path = folder / source.relative_to(room / "template")
            # What is run from here must be nobody else's to change.
            replace_file(path, partial(_copy, source.read_bytes()))
            # A wheel does not keep what may be executed.
            path.chmod(0o755 if path.suffix == ".sh" else 0o644)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            print(path)
    return 0


def _copy(content: bytes, file: BinaryIO) -> None:
    file.write(content)
