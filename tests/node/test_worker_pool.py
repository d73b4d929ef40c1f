"""Tasks go to the worker of their run, and what a worker dies over is answered."""

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from flwr_safedshb.flower.compat import ErrorCode
from flwr_safedshb.node import dispatcher as foremen
from flwr_safedshb.node.approvals import Approvals
from flwr_safedshb.node.dispatcher import Foreman
from flwr_safedshb.node.flower_patches import runtime_client as tasks
from flwr_safedshb.node.flower_patches.runtime_client import Bundle, Claim, SuperNode
from flwr_safedshb.node.worker_pool import Worker
from tests.guard import HANGS

SUPERNODE = SuperNode("127.0.0.1:1")


class Hands:
    """A nursery whose workers are this test's to play."""

    def __init__(self) -> None:
        self.links: list[socket.socket] = []

    def worker(self) -> socket.socket:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.settimeout(HANGS)
        self.links.append(theirs)
        return mine

    def told(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.links[number].recv(2**20))
        return found

    def say(self, number: int, **words: object) -> None:
        self.links[number].sendall(json.dumps(words).encode())


@pytest.fixture
def hands() -> Hands:
    return Hands()


@pytest.fixture
def foreman(hands: Hands) -> Foreman:
    return Foreman(hands, SUPERNODE, Approvals(frozenset({"a" * 64})))  # type: ignore[arg-type]


def test_a_run_has_one_worker_and_one_task_at_a_time(
    hands: Hands, foreman: Foreman
) -> None:
    foreman.assign(Claim(7, "first"))
    foreman.assign(Claim(7, "second"))
    foreman.assign(Claim(8, "other"))
    assert len(hands.links) == 2
    assert hands.told(0) == {
        "address": SUPERNODE.address,
        "token": "first",
        "approved": "a" * 64,
    }
    assert hands.told(1)["token"] == "other"
    hands.say(0, head="00", about="round 3 (train)")
    foreman.attend(1.0)
    hands.links[0].setblocking(False)
    with pytest.raises(BlockingIOError):
        hands.links[0].recv(10)
    hands.say(0, done=True)
    foreman.attend(1.0)
    assert hands.told(0)["token"] == "second"
    assert (foreman.served, foreman.last) == (1, "round 3 (train) of run 7")


def test_what_a_worker_dies_over_is_answered_and_the_rest_goes_on(
    hands: Hands, foreman: Foreman, monkeypatch: pytest.MonkeyPatch
) -> None:
    buried: list[tuple[object, ...]] = []
    monkeypatch.setattr(tasks, "give_up", lambda *told: buried.append(told))
    foreman.assign(Claim(7, "first"))
    foreman.assign(Claim(7, "second"))
    hands.say(0, head="abcd", about="")
    foreman.attend(1.0)
    hands.links[0].close()
    foreman.attend(1.0)
    assert buried == [
        (SUPERNODE, "first", b"\xab\xcd", "the process of the ClientApp has died")
    ]
    assert len(hands.links) == 2
    assert hands.told(1)["token"] == "second"


def test_silent_workers_are_let_go(
    hands: Hands, foreman: Foreman, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreman.assign(Claim(7, "first"))
    assert hands.told(0)["token"] == "first"
    monkeypatch.setattr(foremen, "_SILENCE", 0.0)
    foreman.attend(0.0)  # at work: it stays
    hands.say(0, done=True)
    foreman.attend(1.0)
    foreman.attend(0.0)
    assert hands.links[0].recv(10) == b""


def test_the_oldest_idle_worker_makes_room(
    hands: Hands, foreman: Foreman, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foremen, "_MAX_WORKERS", 1)
    for run in (7, 8):
        foreman.assign(Claim(run, "t"))
        hands.told(run - 7)
        hands.say(run - 7, done=True)
        foreman.attend(1.0)
    foreman.attend(0.0)
    assert hands.links[0].recv(10) == b""
    foreman.assign(Claim(8, "again"))
    assert hands.told(1)["token"] == "again"


@pytest.mark.parametrize(
    ("loaded", "approved", "words"),
    [
        ("", None, None),
        ("", frozenset({Bundle(b"app", "", "").hash}), None),
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
    worker._loaded = loaded
    # What the run says of itself is no matter.
    bundle = Bundle(b"app", "approved/app", "1.0")
    found = worker._unwanted(bundle, Approvals(approved))
    if words is None:
        assert found is None
    else:
        assert found is not None
        code, reason = found
        assert code == ErrorCode.INVALID_FAB
        assert words in reason


SCRIPT = """
import json, os, socket
from flwr_safedshb.node import workers
workers._IMPORTED = ()
workers._serve = lambda link: (link.sendall(str(os.getpid()).encode()), os._exit(0))
nursery = workers.Nursery()
secret = "s3cret"
links = [nursery.worker() for _ in range(2)]
pids = [int(link.recv(100)) for link in links]
assert len({*pids, os.getpid()}) == 3
print("forked")
"""


@pytest.mark.process
def test_the_nursery_forks_a_process_for_each_worker() -> None:
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
        "from flwr_safedshb.node import workers; "
        "workers._IMPORTED = ('no_such_module',); workers.Nursery().worker()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=HANGS
    )
    assert done.returncode == 1
    assert "No module named 'no_such_module'" in done.stderr
    assert "workers cannot be started" in done.stderr


@pytest.mark.process
def test_a_nursery_ends_with_its_foreman() -> None:
    script = (
        "from flwr_safedshb.node import workers; workers._IMPORTED = (); "
        "workers.Nursery()"
    )
    # It holds the pipe of this process's output: were it to stay, this would wait.
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=HANGS, check=True
    )
    assert done.stdout == b""
