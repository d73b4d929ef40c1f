"""The wheel alone, without the repository, is enough for the drop-in example."""

import csv
import json
import re
import subprocess
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.environments import ROOT, built_wheel, installed, variables
from tests.guard import HANGS
from tests.test_contributing import BLOCKS, OWN
from tests.test_hygiene import CUDA, plain

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
    assert {"flwr_safedshb/py.typed", "flwr_safedshb/cli/template/LICENSE"} < {*names}
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


# A private run on a machine that has what the base of the wheel asks for, and no more.
BASE_DRIVER = """
import importlib.abc, json, sys

hidden = set(json.loads(sys.argv[1]))

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import torch
from flwr_safedshb import (
    InProcessGrid, PrivacyPlan, SafeDSHB, SafeDSHBClient, SeededRandomness, client_app,
    trained_arrays,
)
from flwr_safedshb.cli import main

inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
data, model = (inputs, inputs.sum(dim=1, keepdim=True)), torch.nn.Linear(3, 1)

def client(context):
    plan, seeded = PrivacyPlan(1.0, 1.0, 4, 40), SeededRandomness(0)
    loss = torch.nn.MSELoss()
    return SafeDSHBClient(model, loss, data, plan, context, randomness=seeded)

grid = InProcessGrid(client_app(client), 3)
strategy = SafeDSHB(num_malicious_nodes=1, server_learning_rate=0.1)
result = strategy.start(grid, trained_arrays(model), 2)
assert len(result.train_metrics_clientapp) == 2 and not result.skipped_rounds
assert PrivacyPlan(1.0, 1.0, 4, 40).epsilon(2, 1e-5) > 0
assert main(["rules", "--n", "7", "--f", "2"]) == 0
assert not hidden & {name.partition(".")[0] for name in sys.modules}
"""


def needed_packages() -> set[str]:
    """Return the packages that `pip install` of the base brings, by plain names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [(Requirement(text), "") for text in project["dependencies"]]
    found: set[str] = set()
    while waiting:
        needed, extra = waiting.pop()
        wanted = needed.marker is None or needed.marker.evaluate({"extra": extra})
        if not wanted or plain(needed.name) in found:
            continue
        found.add(plain(needed.name))
        texts = metadata.requires(needed.name) or ()
        waiting += [(Requirement(text), "") for text in texts]
    return found


@pytest.mark.process
def test_the_base_alone_trains(python: Path, tmp_path: Path) -> None:
    """What the extras bring is hidden: Ray, plots, numba, tools of operators."""
    needed = needed_packages()
    hidden = {
        module
        for module, owners in metadata.packages_distributions().items()
        if not {plain(owner) for owner in owners} & {*needed, "flwr-safedshb"}
    }
    assert {"matplotlib", "numba", "prometheus_client", "ray", "sklearn"} <= hidden
    assert not {"flwr", "torch", "opacus", "hydra"} & hidden
    table = (ROOT / "docs" / "quickstart.md").read_text()
    (most,) = re.findall(r"\| \(nothing\) \| (\d+) \|", table)
    # CUDA's libraries come with some builds of torch.
    ours = [name for name in needed if not CUDA.match(name)]
    assert len(ours) <= int(most)
    (tmp_path / "driver.py").write_text(BASE_DRIVER)
    ran = subprocess.run(
        [str(python), "driver.py", json.dumps(sorted(hidden))],
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
