"""A machine with the wheel alone: the package without the repository."""

import os
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIP = (sys.executable, "-m", "pip")


def built_wheel(folder: Path) -> Path:
    """Build the wheel of this repository into a folder."""
    subprocess.run(
        [
            *(*PIP, "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
            *("--wheel-dir", str(folder), str(ROOT)),
        ],
        check=True,
    )
    (path,) = folder.glob("flwr_safedshb-*.whl")
    return path


def installed(folder: Path, wheel: Path) -> Path:
    """Make an environment with the wheel, and what it needs as it is installed here.

    Dependencies are reached by a path file, and path files in a folder reached so are
    not read again: the editable install of this repository stays out.

    Returns
    -------
    Path
        Of its Python.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    purelib = next(folder.glob("lib/python*/site-packages"))
    (purelib / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    command = [*PIP, "--python", str(python), "install", "--quiet"]
    command += ["--no-deps", "--no-index", "--ignore-installed"]
    subprocess.run([*command, str(wheel)], check=True)
    for point in distribution("flwr").entry_points.select(group="console_scripts"):
        module, _, name = point.value.partition(":")
        script = folder / "bin" / point.name
        script.write_text(f"#!{python}\nfrom {module} import {name}\n{name}()\n")
        script.chmod(0o755)
    return python


def variables() -> dict[str, str]:
    """Return this process's environment without what leads to the repository."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    return {k: v for k, v in os.environ.items() if k not in hidden}
