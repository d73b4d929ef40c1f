"""Look at an app, and let a node run it: its name, its files, its imports, its hash.

Give the bundle that `flwr build` made, or the folder of an app to build it from.
Nothing of it is unpacked or run. With a node's file its hash is added to approved-apps.

  safedshb approve my-app.fab
  safedshb approve path/to/app --node node.toml
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("app", type=Path, help="bundle (.fab), or an app's folder")
    parser.add_argument("--node", type=Path, help="the node's TOML file to write to")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print what the app is, and add it to the node's list."""
    from flwr_safedshb.cli._listing import print_table
    from flwr_safedshb.node.approvals import KEY, approve_in_file, inspect_bundle
    from flwr_safedshb.node.flower_patches.fab import build_bundle
    from flwr_safedshb.sanitize import escape

    path: Path = arguments.app
    app = inspect_bundle(build_bundle(path) if path.is_dir() else path.read_bytes())
    if arguments.json:
        content = {
            **vars(app),
            "imports": {k: sorted(v) for k, v in app.imports.items()},
        }
        print(json.dumps(content, indent=2))
    else:
        rows = [
            (name, str(size), ", ".join(sorted(app.imports.get(name, ()))))
            for name, size in app.files.items()
        ]
        title = f"{app.publisher}/{app.name} {app.version}"
        print_table(title, ("file", "bytes", "imports"), rows, number="bytes")
        for part, place in app.components.items():
            print(escape(f"{part}: {place}"))
        print(f'{KEY} = "{app.hash}"')
    if arguments.node is not None:
        approve_in_file(arguments.node, app)
        print(
            f"added to {arguments.node}; a node that is running reads it with its "
            "next message"
        )
    return 0
