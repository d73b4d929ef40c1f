"""The README's code runs, and says what happens."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from flwr.app import Context

ROOT = Path(__file__).parent.parent


class MyApp(ModuleType):
    """The model and the data that a reader of the README has."""

    @staticmethod
    def make_model() -> torch.nn.Module:
        return torch.nn.Linear(8, 2)

    @staticmethod
    def load_data(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        node = int(context.node_config["partition-id"])
        inputs = torch.randn(500, 8, generator=torch.Generator().manual_seed(node))
        return inputs, (inputs[:, 0] > 0).long()


@pytest.mark.federation
def test_python_of_the_readme_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The app learns under attack, at the epsilon that it says."""
    monkeypatch.setitem(sys.modules, "my_app", MyApp("my_app"))
    text = (ROOT / "README.md").read_text()
    fifteen, attack = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert sum(bool(line) for line in fifteen.splitlines()) == 15
    names: dict[str, object] = {"__name__": "readme"}
    torch.manual_seed(0)
    for block in (fifteen, attack):
        exec(compile(block, "README.md", "exec"), names)
    said = caplog.text
    (accuracy,) = re.findall(r"median accuracy that nodes report is ([0-9.]+)", said)
    assert float(accuracy) > 0.8
    assert "epsilon from 2.99 to 2.99" in said


def test_commands_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text()
    targets = (ROOT / "Makefile").read_text()
    found = re.findall(r"(?:^|`)make ([a-z]+)", text, flags=re.MULTILINE)
    assert {"demo", "test"} <= set(found)
    for target in found:
        assert f"\n{target}:" in targets


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "examples/README.md"])
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    for link in links:
        if not link.startswith("https://"):
            assert (page.parent / link).exists(), link
    assert links or name != "README.md"


def test_pictures_are_light() -> None:
    for picture in (ROOT / "docs" / "images").iterdir():
        assert picture.stat().st_size < 150_000, picture.name
