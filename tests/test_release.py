"""What is released is the same bytes wherever it is built, and has one version."""

import importlib.util
import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from simulations.loopback import ROOT


def load_release() -> Any:
    path = ROOT / ".ci" / "release.py"
    spec = importlib.util.spec_from_file_location("release", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_version_is_in_one_place() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert metadata.version("flwr-safedshb") == version
    names = [*ROOT.glob("flwr_safedshb/**/*.py"), ROOT / "CITATION.cff"]
    pattern = re.compile(
        rf"^\W*(__version__|version)\W*[=:].*{re.escape(version)}", re.M
    )
    assert [str(path) for path in names if pattern.search(path.read_text())] == []


def test_what_is_released_lists_the_pins_of_the_base() -> None:
    pins = load_release().find_pins()
    assert {"flwr", "opacus", "torch", "uvicorn"} <= {*pins}
    assert not {"ray", "numba", "pytest"} & {*pins}


def test_the_citation_names_the_paper() -> None:
    found = OmegaConf.create((ROOT / "CITATION.cff").read_text())
    cited = OmegaConf.select(found, "preferred-citation")
    assert "Trilemma" in cited.title
    assert cited.authors[0]["family-names"] == "Allouah"


@pytest.mark.process
def test_the_wheel_is_the_same_bytes_from_the_checkout_and_from_the_sdist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a copy of the tracked files, as they are now."""
    copy = tmp_path / "copy"
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False
    )
    if listed.returncode:
        pytest.skip("this is no checkout")
    for name in listed.stdout.decode().split("\0")[:-1]:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=copy, check=True)
    own = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *own, "commit", "-qm", "all"], cwd=copy, check=True)
    release = load_release()
    monkeypatch.setattr(release, "ROOT", copy)
    monkeypatch.setattr(release, "OUTPUT", tmp_path / "out")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    release.compare_builds()
    assert len([*(tmp_path / "out").iterdir()]) == 2
