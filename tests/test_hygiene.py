"""Nothing untrusted is unpickled, sizes are bounded first, versions are pinned."""

import ast
import io
import pickle
import re
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from numpy.typing import NDArray
from packaging.requirements import Requirement

from flwr_safedshb.algorithm import wire
from flwr_safedshb.algorithm.refusal import RefusedError
from flwr_safedshb.algorithm.screening import Excluded, screen_reply
from flwr_safedshb.algorithm.wire import Template
from flwr_safedshb.app import client_app
from flwr_safedshb.flower.compat import set_process_run
from simulations.loopback import ROOT
from tests.clients import THETA, ledger, make, node

# Each of them can run what it reads.
UNPICKLING = {"cloudpickle", "dill", "marshal", "pickle", "shelve", "yaml"}
RUNNING = {"eval", "exec", "__import__", "torch.load", "os.system"}
SOURCES = [
    path
    for room in ("flwr_safedshb", "simulations", "examples")
    for path in sorted((ROOT / room).rglob("*.py"))
]


def dangers(path: Path) -> list[str]:
    """Return what in a file could run what it reads."""
    found = []
    for item in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(item, ast.Import):
            names = [alias.name for alias in item.names]
        elif isinstance(item, ast.ImportFrom):
            names = [item.module or ""]
        found += [name for name in names if name.split(".")[0] in UNPICKLING]
        if not isinstance(item, ast.Call):
            continue
        function = ast.unparse(item.func)
        given = {word.arg: ast.unparse(word.value) for word in item.keywords}
        if function in RUNNING or given.get("shell") == "True":
            found.append(function)
        if function in ("np.load", "numpy.load"):
            pickles = given.get("allow_pickle", "not said")
            if pickles != "False":
                found.append(f"{function}(allow_pickle: {pickles})")
    return found


def test_no_source_can_run_what_it_reads() -> None:
    assert len(SOURCES) > 50
    assert {str(p): found for p in SOURCES if (found := dangers(p))} == {}


def test_the_search_finds_what_it_is_for(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    for line in (
        "import pickle",
        "from dill import loads",
        "torch.load(f)",
        "np.load(f)",
        "np.load(f, allow_pickle=True)",
        "subprocess.run(x, shell=True)",
        "eval(x)",
    ):
        path.write_text(line)
        assert len(dangers(path)) == 1, line
    path.write_text("np.load(f, allow_pickle=False)\nmodel.eval()\njson.loads(x)")
    assert dangers(path) == []


class Bomb:
    """Unpickled it imports a module that nothing else does."""

    def __reduce__(self) -> tuple[object, ...]:
        return __import__, ("antigravity",)


def armed() -> dict[str, Array]:
    """Return arrays that would run code if they were unpickled."""
    values = np.empty((1, 3), object)
    values[:] = Bomb()
    buffer = npy_bytes(values)
    return {
        "an array of objects": Array("float32", (1, 3), "numpy.ndarray", buffer),
        "a bare pickle": Array(
            "float32", (1, 3), "numpy.ndarray", pickle.dumps(Bomb())
        ),
    }


def npy_bytes(values: NDArray[np.object_]) -> bytes:
    with io.BytesIO() as buffer:
        np.lib.format.write_array(buffer, values, allow_pickle=True)
        return buffer.getvalue()


@pytest.mark.parametrize("kind", armed())
def test_a_server_cannot_make_a_client_unpickle(kind: str, tmp_path: Path) -> None:
    arrays = ArrayRecord({"weight": armed()[kind], "bias": Array(THETA[1])})
    config = ConfigRecord({"step": 0, "momentum": 0.5})
    set_process_run(1)
    content = RecordDict({"arrays": arrays, "config": config})
    for message_type in ("train", "evaluate"):
        message = Message(content, dst_node_id=2, message_type=message_type)
        with pytest.raises((RefusedError, ValueError)):
            client_app(make)(message, node(tmp_path))
    assert "antigravity" not in sys.modules
    path = tmp_path / "state"
    assert not path.exists() or not ledger(tmp_path).charges()


@pytest.mark.parametrize("kind", armed())
def test_a_client_cannot_make_the_server_unpickle(kind: str) -> None:
    model = ArrayRecord({"weight": Array(THETA[0]), "bias": Array(THETA[1])})
    set_process_run(1)
    asked = Message(RecordDict(), dst_node_id=2, message_type="train")
    arrays = ArrayRecord({"weight": armed()[kind], "bias": Array(THETA[1])})
    reply = Message(RecordDict({"arrays": arrays}), reply_to=asked)
    assert isinstance(screen_reply(Template.of(model), reply), Excluded)
    # Nor does Flower, where built-in strategies decode.
    with pytest.raises(ValueError, match="pickle"):
        arrays.to_numpy_ndarrays()
    assert "antigravity" not in sys.modules


def test_a_reply_larger_than_the_model_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = ArrayRecord({"weight": Array(THETA[0]), "bias": Array(THETA[1])})
    template = Template.of(model)

    def decode(array: Array) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(wire, "_parse_header", decode)
    set_process_run(1)
    asked = Message(RecordDict(), dst_node_id=2, message_type="train")
    # The first array is in order: sizes are looked at before any array is.
    large = Array(np.zeros(10**6, np.float32))
    arrays = ArrayRecord({"weight": Array(THETA[0]), "bias": large})
    reply = Message(RecordDict({"arrays": arrays}), reply_to=asked)
    assert screen_reply(template, reply) == Excluded("too-large")


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [line for line in lines if line and not line.startswith("#")]
    parts = [re.fullmatch(r"([A-Za-z0-9._-]+)==([^\s;]+)(?: *;.*)?", x) for x in found]
    assert None not in parts, "every line pins one version"
    return {plain(p[1]): p[2] for p in parts if p is not None}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# A torch that was built for CUDA pins its libraries itself.
CUDA = re.compile(r"cuda-|nvidia-|triton$")


def test_all_that_is_needed_at_run_time_is_pinned_and_is_what_runs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [Requirement(text) for text in project["dependencies"]]
    seen: set[str] = set()
    pinned = pins()
    while waiting:
        needed = waiting.pop()
        name = plain(needed.name)
        marker = needed.marker
        if name in seen or (marker is not None and not marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        if CUDA.match(name):
            continue
        assert name in pinned, f"{name} is not pinned"
        assert metadata.version(name).split("+")[0] == pinned[name].split("+")[0], name
        waiting += map(Requirement, metadata.requires(name) or ())
    assert len(seen) > 40


# The benchmarks' peers, which `make peers` installs; what is not there is left out.
# Matplotlib draws the plot of a command, whose error without it says how to get it.
OPTIONAL = {"byzfl", "byzpy", "matplotlib", "prometheus_client"}
# The package of the app that `safedshb new` writes.
TEMPLATE = {"new_app"}
# Which lists of pyproject.toml each room may import from.
ROOMS = {
    "flwr_safedshb": ("compiled", "gate", "metrics", "node"),
    "simulations": ("compiled", "gate", "medical", "simulation", "tensorboard"),
    "tests": (
        "compiled",
        "metrics",
        "node",
        "simulation",
        "tensorboard",
        "docs",
        "dev",
    ),
}


@pytest.mark.parametrize("room", ROOMS)
def test_every_import_is_declared(room: str) -> None:
    """A package that only another one brings may be gone with its next version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = list(project["dependencies"])
    for extra in ROOMS[room]:
        texts += project["optional-dependencies"][extra]
    assert strangers(ROOT / room, texts) <= OPTIONAL | TEMPLATE


EXAMPLES = sorted(
    str(path.parent.relative_to(ROOT))
    for place in ("examples", "flwr_safedshb/cli")
    for path in ROOT.glob(f"{place}/**/pyproject.toml")
)


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_import_of_an_example_is_declared(example: str) -> None:
    folder = ROOT / example
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    own = {path.stem for path in folder.rglob("*.py")} | TEMPLATE
    assert strangers(folder, project["dependencies"]) <= own


@cache
def owners() -> Mapping[str, list[str]]:
    """Return which distributions an import may come from; to look takes long."""
    return metadata.packages_distributions()


def strangers(folder: Path, texts: list[str]) -> set[str]:
    """Return what is imported in a folder and is in none of these requirements."""
    declared = {plain(Requirement(text).name) for text in texts}
    imported: set[str] = set()
    for path in folder.rglob("*.py"):
        for item in ast.walk(ast.parse(path.read_text())):
            if isinstance(item, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in item.names}
            elif isinstance(item, ast.ImportFrom) and item.level == 0:
                imported.add(str(item.module).split(".")[0])
    found = owners()
    return {
        name
        for name in imported - set(sys.stdlib_module_names) - set(ROOMS)
        if not {plain(owner) for owner in found.get(name, ())} & declared
    }
