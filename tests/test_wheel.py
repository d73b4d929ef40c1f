"""The wheel alone, without the repository, is enough for the drop-in example."""

import csv
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.environments import ROOT, built_wheel, installed, variables
from tests.guard import HANGS
from tests.test_contributing import BLOCKS, OWN

# The quickstart as a user runs it without Ray, away from the repository.
DRIVER = """
import importlib.util, pathlib, sys
import flwr_safedshb
assert pathlib.Path(flwr_safedshb.__file__).is_relative_to(sys.prefix)
assert "simulations" not in sys.modules
assert importlib.util.find_spec("tests") is None
import app
from flwr_safedshb import InProcessGrid
grid = InProcessGrid(app.client, 5, {"num-rounds": 3})
app.server(grid, grid.server_context())
assert pathlib.Path("model.pt").exists()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.process
def test_the_wheel_has_the_package_and_the_simulations_and_nothing_else(
    wheel: Path,
) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    rooms = {name.split("/")[0].split("-")[0] for name in names}
    assert rooms == {"flwr_safedshb", "simulations"}
    assert "simulations/conf/attack/foe.yaml" in names
    assert not [name for name in names if "benchmarks" in name or "chaos" in name]
    assert "flwr_safedshb/py.typed" in names
    source = {
        str(path.relative_to(ROOT)) for path in ROOT.glob("flwr_safedshb/**/*.py")
    }
    assert source <= set(names)


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("environment"), wheel)


@pytest.mark.process
def test_the_drop_in_example_runs_on_the_wheel(python: Path, tmp_path: Path) -> None:
    example = (ROOT / "examples" / "quickstart" / "app.py").read_text()
    (tmp_path / "app.py").write_text(example)
    (tmp_path / "driver.py").write_text(DRIVER)
    ran = subprocess.run(
        [str(python), "driver.py"],
        cwd=tmp_path,
        env=variables(),
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


@pytest.mark.process
def test_a_study_of_ones_own_runs_on_the_wheel_from_an_empty_directory(
    python: Path, tmp_path: Path
) -> None:
    """Own rule, own attack, a grid of 2 x 3 x 3, one CSV file, plots, one file."""
    (tmp_path / OWN).write_text(BLOCKS[OWN])
    ran = subprocess.run(
        [str(python), "-m", "simulations.study", "own_study:study", "--workers", "2"],
        cwd=tmp_path,
        env=variables(),
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    folder = tmp_path / "outputs" / "own"
    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 3 * 3
    assert {row["rule"] for row in rows} == {"midrange", "SMEA"}
    assert (folder / "figures" / "Test-accuracy_accuracy.png").exists()
    assert "midrange" in (folder / "report.html").read_text()


@pytest.mark.process
def test_the_command_is_installed_and_every_command_answers(
    python: Path, tmp_path: Path
) -> None:
    def said(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(python.with_name("safedshb")), *arguments]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=variables(),
            capture_output=True,
            text=True,
            check=False,
        )

    assert "SMEA()" in said("rules").stdout
    # What needs the repository is not offered where it is not.
    for path in (ROOT / "flwr_safedshb" / "cli").glob("[!_]*.py"):
        assert said(path.stem, "--help").returncode == 0, path.stem
    assert "demo" not in said("--help").stdout
