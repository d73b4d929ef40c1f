"""Write a Flower app that is private and robust, and runs at once.

For example:
  safedshb new my-app
  cd my-app && python simulate.py
  flwr run . local --stream --federation-config "num-supernodes=5"

The app has a model, a client, a server, and a README that says where to change what.
"""

from __future__ import annotations

import argparse
import keyword
import re
from importlib import resources, util
from pathlib import Path

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_TEMPLATE_NAME = "new-app"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", help="of the app and its folder, such as my-app")


def run(arguments: argparse.Namespace) -> int:
    """Write the app into a new folder of the app's name."""
    name: str = arguments.name
    folder, module = Path(name), name.replace("-", "_")
    _check_name(name, module, folder)
    template = resources.files("flwr_safedshb.cli") / "template"
    with resources.as_file(template) as room:
        for source in sorted(room.rglob("*")):
            if not source.is_file() or "__pycache__" in source.parts:
                continue
            path = Path(name, *source.relative_to(room).parts)
            path = Path(*(part.replace("new_app", module) for part in path.parts))
            path.parent.mkdir(parents=True, exist_ok=True)
            text = source.read_text().replace(_TEMPLATE_NAME, name)
            path.write_text(text.replace("new_app", module))
            print(path)
    print(f"\ncd {name} && python simulate.py")
    return 0


def _check_name(name: str, module: str, folder: Path) -> None:
    """Refuse a name that Flower or Python cannot use, or that is taken."""
    if not _NAME.fullmatch(name) or len(name) > 40:
        raise ValueError(
            f"name={name!r} must be lower-case letters, digits and single hyphens, a "
            "letter first, at most 40; for example my-app"
        )
    if folder.exists():
        raise ValueError(f"{folder} exists and is not overwritten")
    if keyword.iskeyword(module) or util.find_spec(module) is not None:
        raise ValueError(
            f"name={name!r} would hide the Python module {module}; choose another"
        )
