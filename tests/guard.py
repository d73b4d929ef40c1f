"""What a test may do to the world: start processes only if it says so, call nobody.

Python announces such events to audit hooks before they happen, so a test that forgot
its mark fails, however deep in a library the process is started.
"""

import _posixsubprocess
import socket
import sys
from collections.abc import Generator
from typing import Any

import pytest
import threadpoolctl

_STARTS = {
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "subprocess.Popen",
}
_LOCAL = ("127.", "::", "localhost", "0.0.0.0", "None")

# Seconds after which a test that waits for a process has hung. A busy machine may need
# most of them, an idle one none: no test waits for less.
HANGS = 600.0

_running: pytest.Item | None = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Remember which test runs, from its fixtures' start to their end."""
    global _running
    _running = item
    try:
        return (yield)
    finally:
        _running = None


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _running is None:
        return
    if event in _STARTS:
        _refuse_process(arguments[:2])
    elif event == "socket.connect":
        connection, address = arguments
        # To "connect" a datagram socket sends nothing: Ray learns its own address so.
        if connection.type != socket.SOCK_DGRAM and isinstance(address, tuple):
            _refuse_stranger(str(address[0]))
    elif event == "socket.getaddrinfo":
        _refuse_stranger(str(arguments[0]))


def _refuse_process(what: object) -> None:
    assert _running is not None
    if _running.get_closest_marker("process") is None:
        pytest.fail(f"starts {what}: mark the test with @pytest.mark.process")


def _refuse_stranger(host: str) -> None:
    if not host.startswith(_LOCAL) and host != socket.gethostname():
        pytest.fail(f"calls {host}: tests need no network")


def pytest_configure() -> None:
    """Watch from now on; an audit hook cannot be taken away."""
    threadpoolctl.threadpool_info()  # asks the system for its libraries, once
    sys.addaudithook(_watch)
    # multiprocessing and joblib call this one directly, and Python says nothing of it.
    start = _posixsubprocess.fork_exec

    def watched(*arguments: Any) -> int:
        if _running is not None:
            _refuse_process(arguments[0])
        return start(*arguments)

    _posixsubprocess.fork_exec = watched
