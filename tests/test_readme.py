"""The README's code runs, and says what happens."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.federation
def test_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(code) >= 5
    names: dict[str, object] = {"__name__": "readme"}
    for block in code:
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "epsilon = 1.0143 at delta = 0.0001 after 400 steps" in printed


def test_commands_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text()
    targets = (ROOT / "Makefile").read_text()
    found = re.findall(r"(?:^|`)make ([a-z]+)", text, flags=re.MULTILINE)
    assert len(found) >= 4
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
