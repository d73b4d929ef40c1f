"""Who may import whom, and what an import costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import flwr_safedshb

PACKAGE = Path(flwr_safedshb.__file__).parent

# The rooms a room may import from, besides itself.
ROOMS: dict[str, set[str]] = {
    "files": set(),
    "theory": set(),
    "aggregation": {"theory"},
    "attacks": {"aggregation"},
    "privacy": {"files"},
    "flower": set(),
    "exchange": {"flower"},
    "server": {"aggregation", "theory", "flower", "exchange", "files"},
    "client": {"privacy", "flower", "exchange"},
    "grids": {"client", "attacks", "flower", "exchange"},
    "deployment": {"client", "privacy", "flower", "files"},
}
ROOMS["cli"] = set(ROOMS)
FLOWER_ROOMS = ("flower", "exchange", "server", "client", "grids", "deployment", "cli")


def imported_names(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


MODULES = [p for p in sorted(PACKAGE.rglob("*.py")) if p.parent.name != "__pycache__"]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_dependencies_point_one_way(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room == "__init__":
        return
    assert room in ROOMS, f"{room} is no room"
    for name in imported_names(path):
        parts = name.split(".")
        if parts[0] == "flwr_safedshb" and len(parts) > 1:
            assert parts[1] in {room, *ROOMS[room]}, f"{path.name}: {name}"
        assert parts[0] not in ("hydra", "omegaconf", "simulations", "tests")
        if room not in FLOWER_ROOMS:
            assert parts[0] != "flwr", f"{path.name} imports flwr"


def modules_after(statement: str) -> set[str]:
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(run.stdout.split())


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import flwr_safedshb", ("torch", "ray", "hydra", "flwr", "numba", "numpy")),
        (
            "from flwr_safedshb import SMEA\nimport numpy as np\n"
            "SMEA()(np.ones((7, 2)), 3)",
            ("torch", "ray", "hydra", "flwr", "numba", "opacus"),
        ),
    ],
)
def test_imports_stay_light(statement: str, absent: tuple[str, ...]) -> None:
    assert not modules_after(statement) & set(absent)


def test_every_public_name_is_there() -> None:
    for name in flwr_safedshb.__all__:
        assert getattr(flwr_safedshb, name).__name__ == name
    assert set(flwr_safedshb.__all__) <= set(dir(flwr_safedshb))
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = flwr_safedshb.Nothing
