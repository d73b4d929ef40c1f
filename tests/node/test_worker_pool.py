"""Tasks go to the worker of their run, and what a worker dies over is answered."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from flwr.app import UserConfig

from flwr_safedshb.node import dispatcher as dispatchers
from flwr_safedshb.node.dispatcher import Dispatcher
from flwr_safedshb.node.flower_patches import runtime_client
from flwr_safedshb.node.flower_patches.runtime_client import (
    AppBundle,
    ClaimedTask,
    Runtime,
)
from flwr_safedshb.node.node_file import NodeFile, read_node_file
from flwr_safedshb.node.node_status import NodeStatus
from flwr_safedshb.node.owner_rules import OwnerRules, Permission
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
def node(tmp_path: Path) -> NodeFile:
    path = tmp_path / "node.toml"
    path.write_text(f'approved-apps = "{"a" * 64}"\n')
    return read_node_file(path)


@pytest.fixture
def dispatcher(pool: FakeForkServer, node: NodeFile) -> Dispatcher:
    return Dispatcher(pool, SUPERNODE, OwnerRules(node), NodeStatus(None))  # type: ignore[arg-type]


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
        "config": {"approved-apps": "a" * 64},
        "refusal": None,
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
    assert (dispatcher._status.num_answered, dispatcher._status.last_answered) == (
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


@pytest.mark.parametrize(
    ("idle", "limit"), [(0.0, 60.0), (10.0, 60.0), (100.0, 300.0), (800.0, 900.0)]
)
def test_a_worker_ends_once_its_run_is_silent_for_unusually_long(
    pool: FakeForkServer,
    dispatcher: Dispatcher,
    monkeypatch: pytest.MonkeyPatch,
    idle: float,
    limit: float,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for pause in (0.0, idle):
        now[0] += pause
        dispatcher.assign(ClaimedTask(7, "a task"))
        now[0] += 5000.0
        dispatcher.poll(0.0)  # at work: it stays
        assert pool.receive(0)["token"] == "a task"
        pool.send(0, done=True)
        dispatcher.poll(1.0)
    now[0] += limit - 1.0
    dispatcher.poll(0.0)
    assert dispatcher._workers
    now[0] += 2.0
    dispatcher.poll(0.0)
    assert pool.links[0].recv(10) == b""


def test_a_changed_rule_holds_for_the_next_task_of_a_running_worker(
    pool: FakeForkServer, dispatcher: Dispatcher, node: NodeFile
) -> None:
    for text, expected in (
        ("max-epsilon = 1.0\ndelta = 1e-5\n", {"max-epsilon": 1.0, "delta": 1e-5}),
        ("max-epsilon = ", {}),
        ("approved-apps = 5", {}),
    ):
        node.path.write_text(text)
        dispatcher.assign(ClaimedTask(7, "task"))
        packet = pool.receive(0)
        assert packet["config"] == expected
        assert (packet["refusal"] is None) == bool(expected)
        pool.send(0, done=True)
        dispatcher.poll(1.0)
    assert len(pool.links) == 1


def test_the_owner_is_told_what_is_in_force(
    node: NodeFile, caplog: pytest.LogCaptureFixture
) -> None:
    rules = OwnerRules(node)
    assert rules.read() == Permission(node.config)
    assert caplog.text == ""
    for text, words in (
        ("min-noise-multiplier = 2.0\n", "min-noise-multiplier = 2.0"),
        ("nonsense", "Nothing is permitted until this is repaired"),
        ("", "can be read again"),
        (
            '[supernode]\nsuperlink = "a:1"\nroot-certificates = "c"\nkey = "k"\n',
            "restart the node",
        ),
    ):
        node.path.write_text(text)
        rules.read()
        assert words in caplog.text
        caplog.clear()
        rules.read()
        assert caplog.text == ""  # once


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
    worker = Worker(link, "")
    worker._app_hash = loaded
    # What the run says of itself is no matter.
    bundle = AppBundle(b"app", "approved/app", "1.0")
    config: UserConfig = (
        {} if approved is None else {"approved-apps": ",".join(approved)}
    )
    reason = worker._find_refusal(bundle.hash, Permission(config))
    if words is None:
        assert reason is None
    else:
        assert reason is not None
        assert words in reason


SCRIPT = """
import json, os, socket
from flwr_safedshb.node import worker_pool
worker_pool._IMPORTED = ()
def run(link, folder):
    link.sendall(str(os.getpid()).encode())
    os._exit(0)
worker_pool._run_worker = run
server = worker_pool.ForkServer(None)
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
        "pool._IMPORTED = ('no_such_module',); pool.ForkServer(None).fork_worker()"
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
        "worker_pool.ForkServer(None)"
    )
    # It holds the pipe of this process's output: were it to stay, this would wait.
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=HANGS, check=True
    )
    assert done.stdout == b""


BUSY = """
import os, time
from flwr_safedshb.node import worker_pool
worker_pool._IMPORTED = ()
def work(link, folder):
    link.sendall(str(os.getpid()).encode())
    time.sleep(3600)
worker_pool._run_worker = work
server = worker_pool.ForkServer(None)
print(int(server.fork_worker().recv(100)), flush=True)
"""


@pytest.mark.process
@pytest.mark.parametrize("end", ["server.close()", "os.kill(os.getpid(), 9)"])
def test_workers_end_with_the_node_whatever_they_are_doing(end: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUSY + end],
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    worker = Path("/proc") / done.stdout.strip()
    deadline = time.monotonic() + HANGS
    while worker.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
