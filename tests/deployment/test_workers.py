"""Programs that a warm process runs, as they would run by themselves."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from simulations.loopback import ROOT

# Stands for flwr-clientapp: says who and where it is, and ends as it is told to.
PROGRAM = """
import json, os, sys
from pathlib import Path
from flwr_safedshb.deployment import workers

def imported():
    if "broken" in sys.argv:
        import no_such_module
    return program

def program():
    told = {
        "pid": os.getpid(), "parent": os.getppid(), "arguments": sys.argv[1:],
        "directory": os.getcwd(), "word": os.environ.get("WORD"),
    }
    print(json.dumps(told), flush=True)
    print("aside", file=sys.stderr)
    if "fail" in sys.argv:
        raise SystemExit(3)

workers.start(Path(sys.argv[1]), os.getppid(), imported)
"""


def called(folder: Path, log: Path, *arguments: str, word: str = "") -> None:
    with log.open("ab") as output, log.with_suffix(".errors").open("ab") as errors:
        subprocess.run(
            [sys.executable, "-c", PROGRAM, str(folder), *arguments],
            cwd=log.parent,
            env={**os.environ, "WORD": word},
            stdout=output,
            stderr=errors,
            check=True,
            timeout=60,
        )


def lines(log: Path, count: int) -> list[dict[str, object]]:
    deadline = time.monotonic() + 60
    while len(found := log.read_text().splitlines()) < count:
        assert time.monotonic() < deadline, log.with_suffix(".errors").read_text()
        time.sleep(0.02)
    return [json.loads(line) for line in found]


def wait_for_warmth(folder: Path) -> None:
    path = folder / f"{os.getpid()}.sock"
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # Longer than the name of a socket may be.
    folder = tmp_path / ("x" * 100)
    folder.mkdir(mode=0o700)
    return folder


def test_one_process_serves_and_each_call_has_its_own(
    folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    called(folder, log, "first", word="a")
    wait_for_warmth(folder)
    called(folder, log, "second", word="b")
    called(folder, log, "third", "fail", word="c")
    called(folder, log, "fourth", word="d")
    told = sorted(lines(log, 4), key=lambda line: str(line["word"]))
    assert len({line["pid"] for line in told}) == 4
    # The first runs by itself; the others are children of one process, not of ours.
    assert told[0]["parent"] == os.getpid()
    (server,) = {line["parent"] for line in told[1:]}
    assert server != os.getpid()
    assert [line["arguments"][1] for line in told] == [  # type: ignore[index]
        "first",
        "second",
        "third",
        "fourth",
    ]
    assert {line["directory"] for line in told} == {str(tmp_path)}
    deadline = time.monotonic() + 60
    while log.with_suffix(".errors").read_text() != "aside\n" * 4:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_socket_without_a_process_is_made_anew(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    called(folder, log, "first")
    wait_for_warmth(folder)
    called(folder, log, "second")
    told = lines(log, 2)
    server = told[1]["parent"]
    os.kill(int(str(server)), 9)
    called(folder, log, "third")
    assert lines(log, 3)[2]["parent"] == os.getpid()
    count, deadline = 3, time.monotonic() + 60
    while lines(log, count)[-1]["parent"] == os.getpid():
        assert time.monotonic() < deadline
        called(folder, log, "again")
        count += 1
    assert lines(log, count)[-1]["parent"] != server


def test_nothing_runs_where_the_imports_fail(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(subprocess.CalledProcessError):
        called(folder, log, "broken")
    assert "No module named 'no_such_module'" in log.with_suffix(".errors").read_text()
    assert log.read_text() == ""
    assert not any(folder.iterdir())


def test_it_ends_with_the_process_that_it_serves(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    between = f"""
import subprocess, sys, time
from pathlib import Path
command = [sys.executable, "-c", {PROGRAM!r}, {str(folder)!r}]
subprocess.run(command, check=True)
while not any(Path({str(folder)!r}).iterdir()):
    time.sleep(0.02)
"""
    with log.open("wb") as output:
        command = [sys.executable, "-c", between]
        subprocess.run(command, stdout=output, check=True, timeout=60)
    deadline = time.monotonic() + 60
    while any(folder.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_program_in_the_kit_is_flowers_for_flower(tmp_path: Path) -> None:
    programs = [ROOT / "deploy" / "warm", Path(sys.executable).parent]
    path = os.pathsep.join(map(str, [*programs, os.environ["PATH"]]))
    done = subprocess.run(
        ["flwr-clientapp", "--help"],
        env={**os.environ, "PATH": path, "FLWR_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "Run a Flower ClientApp" in done.stdout
    assert (tmp_path / "warm").stat().st_mode & 0o777 == 0o700
