"""Tasks go to the worker of their run, and what a worker dies over is answered."""

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from flwr_safedshb.node import dispatcher as dispatchers
from flwr_safedshb.node.approvals import Approvals
from flwr_safedshb.node.dispatcher import Dispatcher
from flwr_safedshb.node.flower_patches import runtime_client
from flwr_safedshb.node.flower_patches.runtime_client import (
    AppBundle,
    ClaimedTask,
    Runtime,
)
from flwr_safedshb.node.worker_pool import Worker
from tests.guard import HANGS

SUPERNODE = Runtime("127.0.0.1:1")


class FakeForkServer:
    """A fork server whose workers are this test's to play."""

    def __init__(self) -> None:
        self.links: list[socket.socket] = []

    def fork_worker(self) -> socket.socket:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.settimeout(HANGS)
        self.links.append(theirs)
        return mine

    def receive(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.links[number].recv(2**20))
        return found

    def send(self, number: int, **words: object) -> None:
        self.links[number].sendall(json.dumps(words).encode())


@pytest.fixture
def pool() -> FakeForkServer:
    return FakeForkServer()


@pytest.fixture
def dispatcher(pool: FakeForkServer) -> Dispatcher:
    return Dispatcher(pool, SUPERNODE, Approvals(frozenset({"a" * 64})))  # type: ignore[arg-type]


def test_a_run_has_one_worker_and_one_task_at_a_time(
    pool: FakeForkServer, dispatcher: Dispatcher
) -> None:
    dispatcher.assign(ClaimedTask(7, "first"))
    dispatcher.assign(ClaimedTask(7, "second"))
    dispatcher.assign(ClaimedTask(8, "other"))
    assert len(pool.links) == 2
    assert pool.receive(0) == {
        "address": SUPERNODE.address,
        "token": "first",
        "approved": "a" * 64,
    }
    assert pool.receive(1)["token"] == "other"
    pool.send(0, head="00", about="round 3 (train)")
    dispatcher.poll(1.0)
    pool.links[0].setblocking(False)
    with pytest.raises(BlockingIOError):
        pool.links[0].recv(10)
    pool.send(0, done=True)
    dispatcher.poll(1.0)
    assert pool.receive(0)["token"] == "second"
    assert (dispatcher.num_answered, dispatcher.last_answered) == (
        1,
        "round 3 (train) of run 7",
    )


def test_what_a_worker_dies_over_is_answered_and_the_rest_goes_on(
    pool: FakeForkServer, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[tuple[object, ...]] = []
    monkeypatch.setattr(runtime_client, "fail_task", lambda *told: failed.append(told))
    dispatcher.assign(ClaimedTask(7, "first"))
    dispatcher.assign(ClaimedTask(7, "second"))
    pool.send(0, head="abcd", about="")
    dispatcher.poll(1.0)
    pool.links[0].close()
    dispatcher.poll(1.0)
    assert failed == [
        (SUPERNODE, "first", b"\xab\xcd", "the process of the ClientApp has died")
    ]
    assert len(pool.links) == 2
    assert pool.receive(1)["token"] == "second"


def test_silent_workers_are_let_go(
    pool: FakeForkServer, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher.assign(ClaimedTask(7, "first"))
    assert pool.receive(0)["token"] == "first"
    monkeypatch.setattr(dispatchers, "_MAX_IDLE_SECONDS", 0.0)
    dispatcher.poll(0.0)  # at work: it stays
    pool.send(0, done=True)
    dispatcher.poll(1.0)
    dispatcher.poll(0.0)
    assert pool.links[0].recv(10) == b""


def test_the_oldest_idle_worker_makes_room(
    pool: FakeForkServer, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatchers, "_MAX_WORKERS", 1)
    for run in (7, 8):
        dispatcher.assign(ClaimedTask(run, "t"))
        pool.receive(run - 7)
        pool.send(run - 7, done=True)
        dispatcher.poll(1.0)
    dispatcher.poll(0.0)
    assert pool.links[0].recv(10) == b""
    dispatcher.assign(ClaimedTask(8, "again"))
    assert pool.receive(1)["token"] == "again"


@pytest.mark.parametrize(
    ("loaded", "approved", "words"),
    [
        ("", None, None),
        ("", frozenset({AppBundle(b"app", "", "").hash}), None),
        ("", frozenset({"0" * 64}), "approved-apps"),
        ("", frozenset[str](), "approved-apps"),
        ("0" * 64, None, "changed its app"),
    ],
)
def test_a_bundle_is_judged_by_its_bytes_before_it_is_unpacked(
    loaded: str, approved: frozenset[str] | None, words: str | None
) -> None:
    link, _ = socket.socketpair()
    worker = Worker(link)
    worker._app_hash = loaded
    # What the run says of itself is no matter.
    bundle = AppBundle(b"app", "approved/app", "1.0")
    reason = worker._find_refusal(bundle.hash, Approvals(approved))
    if words is None:
        assert reason is None
    else:
        assert reason is not None
        assert words in reason


SCRIPT = """
import json, os, socket
from flwr_safedshb.node import worker_pool
worker_pool._IMPORTED = ()
def run(link):
    link.sendall(str(os.getpid()).encode())
    os._exit(0)
worker_pool._run_worker = run
server = worker_pool.ForkServer()
secret = "s3cret"
links = [server.fork_worker() for _ in range(2)]
pids = [int(link.recv(100)) for link in links]
assert len({*pids, os.getpid()}) == 3
print("forked")
"""


@pytest.mark.process
def test_the_fork_server_forks_a_process_for_each_worker() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=HANGS,
        env={**os.environ},
        check=True,
    )
    assert done.stdout == "forked\n"


@pytest.mark.process
def test_an_import_that_fails_is_seen_and_not_waited_for() -> None:
    script = (
        "from flwr_safedshb.node import worker_pool as pool; "
        "pool._IMPORTED = ('no_such_module',); pool.ForkServer().fork_worker()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=HANGS
    )
    assert done.returncode == 1
    assert "No module named 'no_such_module'" in done.stderr
    assert "workers cannot be started" in done.stderr


@pytest.mark.process
def test_the_fork_server_ends_with_its_dispatcher() -> None:
    script = (
        "from flwr_safedshb.node import worker_pool; worker_pool._IMPORTED = (); "
        "worker_pool.ForkServer()"
    )
    # It holds the pipe of this process's output: were it to stay, this would wait.
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=HANGS, check=True
    )
    assert done.stdout == b""
