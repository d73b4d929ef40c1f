"""A node ends when its owner says so, whatever it is doing."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from flwr_safedshb.node.stop_request import StopRequest
from simulations.loopback import OFFLINE
from tests.guard import HANGS


def fail() -> None:
    raise AssertionError("it was ended by force")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_inside_code_that_catches_exceptions_is_not_lost(
    number: signal.Signals,
) -> None:
    before = signal.getsignal(number)
    with StopRequest(fail) as stop:
        assert not stop.is_set
        assert select.select([stop], [], [], 0.0)[0] == []
        for _ in range(2):
            with suppress(BaseException):
                os.kill(os.getpid(), number)
        assert stop.is_set
        assert select.select([stop], [], [], 0.0)[0] == [stop]
        stop.wait(HANGS)  # at once
    assert signal.getsignal(number) is before


def test_what_hangs_is_ended() -> None:
    ended = threading.Event()
    with StopRequest(ended.set, patience=0.01):
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended.wait(HANGS)


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_node_whose_superlink_is_away_stops_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "node.toml").write_text(
        f'state-dir = "{tmp_path}/state"\nmax-epsilon = 1.0\ndelta = 1e-5\n'
    )
    program = "from flwr_safedshb.cli import main; main()"
    command = [sys.executable, "-c", program, "node"]
    command += [str(tmp_path / "node.toml"), "--insecure", "127.0.0.1:9"]
    environment = {**os.environ, **OFFLINE, "TMPDIR": str(tmp_path / "tmp")}
    environment["FLWR_HOME"] = str(tmp_path)
    (tmp_path / "tmp").mkdir()
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    deadline = time.monotonic() + HANGS
    while "retrying in" not in (said := (tmp_path / "log").read_text()):
        assert process.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(HANGS) == 0
    assert "Stopped" in (tmp_path / "log").read_text()
    assert list((tmp_path / "tmp").iterdir()) == []
    in_session = [
        entry.name
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal() and os.getsid(int(entry.name)) == process.pid
    ]
    assert in_session == []
