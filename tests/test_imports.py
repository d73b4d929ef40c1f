"""Who may import whom, and what an import costs."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    Metadata,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from flwr.superlink.grid import HttpGrid, InMemoryGrid

import flwr_safedshb

PACKAGE = Path(flwr_safedshb.__file__).parent

# The rooms a room may import from, besides itself.
ROOMS: dict[str, set[str]] = {
    "atomic_io": set(),
    "sanitize": set(),
    "stop_signal": set(),
    "theory": set(),
    "aggregation": {"theory"},
    "attacks": {"aggregation"},
    "privacy": {"atomic_io", "sanitize", "stop_signal"},
    "flower": set(),
    "algorithm": {
        *("aggregation", "theory", "privacy", "flower", "atomic_io", "sanitize"),
        "stop_signal",
    },
}
CORE = set(ROOMS)
ROOMS["strategy"] = ROOMS["client"] = ROOMS["central_dp"] = CORE
ROOMS["legacy_api"] = {*CORE, "strategy"}
ROOMS["app"] = {*CORE, "client"}
ROOMS["simulation"] = {*CORE, "client", "app"}
# For whoever runs or attacks what is above; nothing above imports it.
ROOMS["node"] = {*CORE, "client", "app"}
ROOMS["audit"] = {*CORE, "client", "app"}
ROOMS["cli"] = set(ROOMS)
FLOWER_ROOMS = (
    *("flower", "algorithm", "client", "app", "strategy", "legacy_api", "central_dp"),
    *("simulation", "node", "audit", "cli"),
)


# What Flower documents; everything else of it is in flower/.
PUBLIC = {
    "flwr.app",
    "flwr.client",
    "flwr.client.mod",
    "flwr.clientapp",
    "flwr.clientapp.mod",
    "flwr.common",
    "flwr.server",
    "flwr.server.strategy",
    "flwr.serverapp",
    "flwr.serverapp.strategy",
    "flwr.simulation",
}


def imports(source: str) -> Iterator[tuple[str, str]]:
    """Yield module and name of all that is imported, inside functions, too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from ((node.module or "", alias.name) for alias in node.names)


def forbidden_edges(room: str, source: str) -> list[str]:
    """Return the imports of a file that lead out of its room to where they must not."""
    found = []
    for module, name in imports(source):
        parts = [*module.split("."), name]
        if parts[0] == "flwr_safedshb":
            allowed = {room, "", *ROOMS[room]}
            found += [] if parts[1] in allowed else [f"{module} {name}"]
        outside = parts[0] in ("hydra", "omegaconf", "simulations", "tests")
        if outside or (parts[0] == "flwr" and room not in FLOWER_ROOMS):
            found.append(module)
    return found


# The kit's app is no part of the package: it is its users'.
MODULES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path != PACKAGE / "__init__.py" and "template" not in path.parts
]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_dependencies_point_one_way(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert room in ROOMS, f"{room} is no room"
    assert forbidden_edges(room, path.read_text()) == []


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("client", "from flwr_safedshb import strategy"),
        ("client", "def late():\n    import flwr_safedshb.strategy"),
        ("algorithm", "from flwr_safedshb.client import SafeDSHBClient"),
        ("simulation", "from flwr_safedshb.node.service import serve"),
        ("flower", "from flwr_safedshb.node.flower_patches import supernode"),
        ("audit", "from flwr_safedshb.node.approvals import Approvals"),
        ("aggregation", "from flwr.app import Message"),
        ("privacy", "from flwr_safedshb.algorithm.step import Step"),
        ("theory", "from flwr_safedshb.aggregation import SMEA"),
        ("flower", "from simulations.app import composed"),
    ],
)
def test_an_edge_that_is_added_is_found(room: str, line: str) -> None:
    assert len(forbidden_edges(room, line)) == 1


@pytest.mark.parametrize(
    "name", ["step", "requests", "attendance", "norm_bound", "schedules"]
)
def test_algorithm_1_itself_knows_no_flower(name: str) -> None:
    source = (PACKAGE / "algorithm" / f"{name}.py").read_text()
    assert not [module for module, _ in imports(source) if module.startswith("flwr.")]


@lru_cache
def private_names() -> frozenset[str]:
    """Return the private attributes of the objects of Flower that an app meets."""
    info = Metadata(1, "", 1, 1, "", "", 0.0, 1.0, "train")
    record = ArrayRecord([np.zeros(1)])
    things = [info, record, record["0"], ConfigRecord(), MetricRecord(), RecordDict()]
    things += [ClientApp(), HttpGrid(token="x"), FedAvg()]
    things.append(Context(1, 1, {}, RecordDict(), {}))
    kinds = [type(thing) for thing in things] + [Message, Grid, InMemoryGrid]
    names = {name for thing in things for name in vars(thing)}
    names |= {name for kind in kinds for name in vars(kind)}
    names |= {"_metadata", "_content", "_error"}  # of messages
    return frozenset(n for n in names if n[:1] == "_" and n[:2] != "__")


def undocumented(source: str) -> list[str]:
    """Return what a file uses of Flower that Flower does not document."""
    private = private_names()
    found = []
    for module, name in imports(source):
        if module.split(".")[0] != "flwr" or module == "flwr":
            continue
        if module not in PUBLIC or name.startswith("_"):
            found.append(f"{module} {name}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in private:
            own = isinstance(node.value, ast.Name) and node.value.id == "self"
            found += [] if own else [ast.unparse(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            inside = node.value.startswith("flwr.") and node.value not in PUBLIC
            found += [node.value] if inside or node.value in private else []
    return found


USERS = [
    path
    for folder in ("flwr_safedshb", "simulations", "examples")
    for path in sorted((PACKAGE.parent / folder).rglob("*.py"))
    # What operators run may build bundles and change how Flower waits.
    if path.parent.name not in ("flower", "flower_patches") and path.name != "fab.py"
]


def test_undocumented_names_of_flower_are_in_one_room() -> None:
    assert len(USERS) > 100
    assert {
        str(p): found for p in USERS if (found := undocumented(p.read_text()))
    } == {}


@pytest.mark.parametrize(
    "line",
    [
        "from flwr.supercore.task_identity import TaskIdentity",
        "import flwr.superlink.grid",
        "from flwr.app import _private",
        "message.metadata.__dict__['_message_id'] = 'x'",
        "record._data",
        "getattr(grid, '_insecure', False)",
        "import_module('flwr.superlink.grid')",
    ],
)
def test_an_undocumented_name_is_found(line: str) -> None:
    assert len(undocumented(line)) == 1


def modules_after(statement: str) -> set[str]:
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(run.stdout.split())


@pytest.mark.process
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
    with pytest.raises(AttributeError, match="Nothing"):
        _ = flwr_safedshb.Nothing  # type: ignore[attr-defined]


SIMULATIONS = Path(__file__).parents[1] / "simulations"
# The same in the simulations: what an experiment is made of, then what is made of it.
_EXPERIMENT = {"config", "overrides", "data", "models", "plans", "schedules"}
_ENGINES = {*_EXPERIMENT, "experiment", "check", "app", "loopback"}
STUDY = {
    *("command", "config", "data", "engines", "experiment", "models"),
    *("attacks", "exact_epsilon", "results", "rules", "study"),
}
SIMULATION_ROOMS: dict[str, set[str]] = {
    "overrides": set(),
    "config": {"overrides"},
    "command": {"config"},
    # Its command that writes the shares of an experiment.
    "data": {"command", "config", "experiment"},
    "models": {"data"},
    "plans": set(),
    "attacks": set(),
    "rules": set(),
    "exact_epsilon": set(),
    "schedules": {"data", "models", "plans"},
    "experiment": _EXPERIMENT,
    "adversaries": {"attacks", "config", "data", "experiment", "models"},
    "check": {*_EXPERIMENT, "experiment"},
    "app": {*_EXPERIMENT, "adversaries", "attacks", "experiment", "check"},
    "loopback": set(),
    "engines": _ENGINES,
    "study": {"command", "config", "results", "studies"},
    "results": {*_ENGINES, "engines", "command", "study"},
    "run": {*_ENGINES, "engines", "command", "results"},
    "benchmarks": {*_ENGINES, "engines", "chaos", "command", "results"},
    "chaos": {"loopback", "command", "config"},
    "audit": set(),
    "call_graph": {"command"},
}


def simulation_room(module: str) -> str:
    """Return the room of a module; every study is a room of its own."""
    _, room, *rest = module.split(".")
    return f"studies.{rest[0]}" if room == "studies" and rest else room


@pytest.mark.parametrize(
    "path",
    sorted(SIMULATIONS.rglob("*.py")),
    ids=lambda path: str(path.relative_to(SIMULATIONS)),
)
def test_simulations_import_one_way_and_no_study_another(path: Path) -> None:
    name = ".".join(path.relative_to(SIMULATIONS.parent).with_suffix("").parts)
    if "flower-app" in name or "clock" in name:
        return  # not modules of the package
    room = simulation_room(name)
    allowed = STUDY if room.startswith("studies.") else SIMULATION_ROOMS.get(room)
    assert allowed is not None or room in ("__init__", "studies"), f"{room} is no room"
    for module, imported in imports(path.read_text()):
        whole = f"{module}.{imported}".rstrip(".")
        if whole.startswith("simulations."):
            target = simulation_room(whole)
            assert target in {room, *(allowed or ())}, f"{path.name}: {whole}"
