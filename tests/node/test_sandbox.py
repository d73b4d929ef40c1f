"""A confined worker reads its data, charges its ledger, and reaches nothing else."""

import json
import os
import signal
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from flwr_safedshb.node import sandbox
from flwr_safedshb.node.sandbox import check_sandbox, confine, find_landlock

needs_landlock = pytest.mark.skipif(not find_landlock(), reason="no Landlock here")


def in_confinement(
    config: Mapping[str, object], home: Path, port: int, work: Callable[[], object]
) -> object:
    """Return what a confined process finds."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            confine(config, str(home), port)
            found = work()
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        os.write(write, json.dumps(found).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        found = json.loads(answer.read())
    os.waitpid(child, 0)
    return found


def is_allowed(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except PermissionError:
        return False
    return True


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("home", "state", "other"):
        (tmp_path / name).mkdir()
    for name in ("examples.npz", "node.key", "node.toml", "other/file"):
        (tmp_path / name).write_text("content")
    return tmp_path


def config_of(place: Path) -> dict[str, object]:
    return {
        "sandbox": True,
        "data": str(place / "examples.npz"),
        "state-dir": str(place / "state"),
        "max-epsilon": 1.0,
    }


@needs_landlock
@pytest.mark.process
def test_what_a_confined_worker_reaches(place: Path) -> None:
    parent = os.getpid()

    def work() -> dict[str, bool]:
        return {
            "data": is_allowed((place / "examples.npz").read_text),
            "more data": is_allowed(lambda: (place / "examples.npz").write_text("x")),
            "key": is_allowed((place / "node.key").read_text),
            "node file": is_allowed(lambda: (place / "node.toml").open("a")),
            "other": is_allowed((place / "other" / "file").read_text),
            "listing": is_allowed(lambda: [*place.iterdir()]),
            "ledger": is_allowed(lambda: (place / "state" / "x").write_text("x")),
            "home": is_allowed(lambda: (place / "home" / "x").write_text("x")),
            "out": is_allowed(lambda: (place / "state" / "x").rename(place / "x")),
            "passwd": is_allowed(Path("/etc/passwd").read_text),
            "environment": is_allowed(Path(f"/proc/{parent}/environ").read_bytes),
            "memory": is_allowed(Path(f"/proc/{parent}/mem").read_bytes),
            "own maps": is_allowed(Path("/proc/self/maps").read_bytes),
        }

    found = in_confinement(config_of(place), place / "home", 1, work)
    assert isinstance(found, dict), found
    allowed = {name for name, answer in found.items() if answer}
    assert allowed == {"data", "ledger", "home", "passwd", "own maps"}
    assert (place / "examples.npz").read_text() == "content"


@pytest.mark.skipif(find_landlock() < 4, reason="Linux before 6.7")
@pytest.mark.process
def test_a_confined_worker_connects_to_its_supernode_only(place: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as own,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        ports = [int(server.getsockname()[1]) for server in (own, other)]

        def work() -> list[bool]:
            connect = [
                is_allowed(partial(socket.create_connection, ("127.0.0.1", port)))
                for port in ports
            ]
            return [*connect, is_allowed(lambda: socket.create_server(("", 0)))]

        found = in_confinement(config_of(place), place / "home", ports[0], work)
    assert found == [True, False, False]


@pytest.mark.skipif(find_landlock() < 6, reason="Linux before 6.12")
@pytest.mark.process
def test_a_confined_worker_sends_no_signal_to_the_node(place: Path) -> None:
    parent = os.getpid()

    def work() -> bool:
        return is_allowed(lambda: os.kill(parent, signal.SIGURG))

    assert in_confinement(config_of(place), place / "home", 1, work) is False


@needs_landlock
def test_a_key_that_workers_could_read_is_refused(place: Path) -> None:
    config = config_of(place)
    check_sandbox(config, [place / "node.key", place / "node.toml"])
    with pytest.raises(ValueError, match=r"node\.key lies in .*; move it elsewhere"):
        check_sandbox({**config, "data": str(place)}, [place / "node.key"])
    (place / "link").symlink_to(place / "node.key")
    with pytest.raises(ValueError, match="lies in"):
        check_sandbox({**config, "data": str(place)}, [place / "link"])
    check_sandbox({"data": str(place)}, [place / "node.key"])


def test_a_system_without_landlock_is_said_to_be_one(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "find_landlock", lambda: 0)
    with pytest.raises(ValueError, match="needs Landlock"):
        check_sandbox({"sandbox": True}, [])
    with pytest.raises(ValueError, match="sandbox='yes' must be true or false"):
        check_sandbox({"sandbox": "yes"}, [])
    check_sandbox({"sandbox": False}, [])
