"""Every command that a page shows is one that its program understands."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from flwr_safedshb import cli
from simulations.config import compose_config
from simulations.run import jobs
from simulations.study import find_study

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"]
PAGES += sorted(ROOT.glob("docs/*.md"))
BLOCK = re.compile(
    r"^```(?:bash|sh|console)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE
)


def commands() -> list[str]:
    """Return the commands of all pages, their variables and comments resolved."""
    found: list[str] = []
    for page in PAGES:
        for block in BLOCK.findall(page.read_text()):
            names: dict[str, str] = {}
            for line in block.replace("\\\n", " ").splitlines():
                if named := re.fullmatch(r'(\w+)="(.*)"', line):
                    names[named[1]] = named[2]
                    continue
                for name, value in names.items():
                    line = re.sub(rf"\${name}\b", value, line)
                found.append(line.strip().removeprefix("$ "))
    return found


SHOWN = sorted(set(commands()))


def starting_with(words: str) -> list[str]:
    chosen = [line for line in SHOWN if line.startswith(words)]
    assert chosen, f"no page shows {words}"
    return chosen


@pytest.mark.parametrize("line", starting_with("safedshb "))
def test_a_command_of_safedshb_is_understood(line: str) -> None:
    words = shlex.split(line.rstrip(" &"), comments=True)
    cli._make_parser().parse_args(words[1:])


@pytest.mark.parametrize("line", starting_with("make "))
def test_a_target_of_make_is_there(line: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in shlex.split(line, comments=True)[1:]:
        assert f"\n{target}:" in makefile


@pytest.mark.parametrize("line", starting_with("python -m simulations.run"))
def test_an_experiment_can_be_composed(line: str) -> None:
    words = shlex.split(line, comments=True)[3:]
    for job in jobs([word for word in words if word != "-m"]):
        compose_config(shlex.join(job))


@pytest.mark.parametrize("line", starting_with("python -m simulations.study "))
def test_a_study_understands_its_options(line: str) -> None:
    name, *words = shlex.split(line, comments=True)[3:]
    if not name.startswith("own_study"):
        find_study(name).parser().parse_args(words)


@pytest.mark.parametrize("line", starting_with("python -m "))
def test_a_module_is_there_and_has_the_options(line: str) -> None:
    module, *words = shlex.split(line, comments=True)[2:]
    assert find_spec(module) is not None
    sources = (path.read_text() for path in (ROOT / "simulations").rglob("*.py"))
    if module == "simulations.study":
        return
    known = {option for text in sources for option in re.findall(r'"(--[\w-]+)"', text)}
    assert {word for word in words if word.startswith("--")} <= known | {"--help"}


def test_the_page_of_the_command_line_has_every_command_and_no_other() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)
    assert sorted(listed) == sorted(
        path.stem
        for path in Path(cli.__file__).parent.glob("*.py")
        if not path.stem.startswith("_")
    )
