"""The wheel alone, without the repository, is enough for the drop-in example."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# The quickstart as a user runs it without Ray, away from the repository.
DRIVER = """
import importlib.util, pathlib, sys
import flwr_safedshb
assert pathlib.Path(flwr_safedshb.__file__).is_relative_to(sys.prefix)
assert importlib.util.find_spec("simulations") is None
assert importlib.util.find_spec("tests") is None
import app
from flwr_safedshb import InProcessGrid
grid = InProcessGrid(app.client, 5, {"num-rounds": 3})
app.server(grid, grid.server_context())
assert pathlib.Path("model.pt").exists()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run(
        [*command, "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)],
        check=True,
    )
    (path,) = folder.glob("flwr_safedshb-*.whl")
    return path


@pytest.mark.process
def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"flwr_safedshb"}
    assert "flwr_safedshb/py.typed" in names
    source = {
        str(path.relative_to(ROOT)) for path in ROOT.glob("flwr_safedshb/**/*.py")
    }
    assert source <= set(names)


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and the dependencies that are installed here.

    They are reached by a path file, and path files in a folder reached so are not read
    again: the editable install of this repository stays out.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    purelib = next(folder.glob("lib/python*/site-packages"))
    (purelib / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    command = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    command += ["--quiet", "--no-deps", "--no-index", "--ignore-installed"]
    subprocess.run([*command, str(wheel)], check=True)
    return python


def environment() -> dict[str, str]:
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    return {k: v for k, v in os.environ.items() if k not in hidden}


@pytest.mark.process
def test_the_drop_in_example_runs_on_the_wheel(python: Path, tmp_path: Path) -> None:
    example = (ROOT / "examples" / "quickstart" / "app.py").read_text()
    (tmp_path / "app.py").write_text(example)
    (tmp_path / "driver.py").write_text(DRIVER)
    ran = subprocess.run(
        [str(python), "driver.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


@pytest.mark.process
def test_the_command_is_installed_and_every_command_answers(
    python: Path, tmp_path: Path
) -> None:
    def said(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(python.with_name("safedshb")), *arguments]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )

    assert "SMEA()" in said("rules").stdout
    # What needs the repository is not offered where it is not.
    for path in (ROOT / "flwr_safedshb" / "cli").glob("[!_]*.py"):
        assert said(path.stem, "--help").returncode == 0, path.stem
    assert "demo" not in said("--help").stdout
