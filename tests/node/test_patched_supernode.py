"""From a SuperNode replies leave whole, once, and as soon as they can."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.app import Error, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import SubStatus
from flwr.common.serde import message_from_proto
from flwr.supercore.constant import TaskType
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supernode import start_client_internal as main_loop
from flwr.supernode.nodestate import NodeStateFactory

from flwr_safedshb.node.flower_patches import supernode
from flwr_safedshb.node.flower_patches.fleet_api import (
    PackedMessage,
    pack_message,
)
from simulations.loopback import OFFLINE, free_port
from tests.guard import HANGS


class Played:
    """A node's state as Flower keeps it, and what leaves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        objects = ObjectStoreFactory()
        self.state = NodeStateFactory(objectstore_factory=objects).state()
        self.store = objects.store()
        self.sent: list[str] = []
        self.slept: list[float] = []
        self.steps: list[Callable[[], None]] = []
        self.now = 0.0
        monkeypatch.setattr(time, "sleep", self._sleep)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.sender = supernode.ReplySender(main_loop._push_messages)

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        if self.steps:
            self.steps.pop(0)()

    def begin(self, packed: PackedMessage) -> None:
        """Be a worker that has announced a reply."""
        message = supernode_message(packed)
        self.state.store_message(message)
        self.store.preregister(1, packed.tree)

    def whole(self, packed: PackedMessage) -> None:
        """Be a worker that sends a reply."""
        self.begin(packed)
        self.put(packed)

    def work(self) -> int:
        """Be a node that has been given a message."""
        task = self.state.create_task(TaskType.CLIENT_APP, 1, "a")
        assert task is not None
        return task

    def put(self, packed: PackedMessage, count: int | None = None) -> None:
        """Be a worker that sends the parts of a reply."""
        for name in list(packed.objects)[:count]:
            self.store.put(name, packed.objects[name])

    def send(self) -> None:
        def send(message: Message, *_: object) -> tuple[set[str], str]:
            self.sent.append(message.metadata.message_id)
            return set(), ""

        self.sender(self.state, self.store, send=send, push_object=None)


def supernode_message(packed: PackedMessage) -> Message:
    return message_from_proto(packed.message)


def reply(to: str, reason: str = "") -> PackedMessage:
    about = Metadata(1, "", 2, 1, to, "", 0.0, 1.0, "train")
    made = (
        make_message(about, error=Error(2, reason))
        if reason
        else make_message(about, content=RecordDict())
    )
    return pack_message(made)


def name(packed: PackedMessage) -> str:
    return str(packed.message.metadata.message_id)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(monkeypatch)


def test_a_reply_leaves_soon_after_it_is_there(played: Played) -> None:
    answer = reply("a")
    played.steps = [lambda: None, lambda: played.whole(answer)]
    played.send()
    assert played.sent == [name(answer)]
    assert played.now < 0.05


def test_looks_are_rarer_the_longer_a_step_takes(played: Played) -> None:
    answer = reply("a")
    played.steps = [lambda: None] * 60
    played.steps[-1] = lambda: played.whole(answer)
    played.send()
    assert played.now > 5.0
    assert max(played.slept) == 0.5


def test_half_a_reply_is_not_begun(played: Played) -> None:
    answer = reply("a")
    played.begin(answer)
    played.put(answer, 1)
    played.steps = [lambda: played.sent.append("nothing"), lambda: played.put(answer)]
    played.send()
    assert played.sent == ["nothing", name(answer)]


def test_an_error_takes_the_place_of_half_a_reply(played: Played) -> None:
    answer, error = reply("a"), reply("a", "the process has died")
    played.begin(answer)
    played.put(answer, 1)
    played.steps = [lambda: None, lambda: played.whole(error)]
    played.send()
    assert played.sent == [name(error)]
    assert not played.state.get_messages_legacy(is_reply=True)
    assert len(played.store) == 0


def test_an_error_after_a_reply_is_not_the_answer_to_the_next(played: Played) -> None:
    first, error, second = reply("a"), reply("a", "it has died"), reply("b")
    played.whole(first)
    played.send()
    played.whole(error)
    played.work()
    played.steps = [lambda: played.whole(second)]
    played.send()
    assert played.sent == [name(first), name(second)]
    assert len(played.store) == 0


def test_what_answers_nothing_is_sent_if_nothing_else_will_come(
    played: Played,
) -> None:
    """So that a node which does not answer what it was asked is not waited for."""
    first, again = reply("a"), reply("a", "another answer")
    played.whole(first)
    played.send()
    task = played.work()
    played.whole(again)

    def end() -> None:
        assert played.state.finish_task(task, SubStatus.FAILED, "")

    played.steps = [lambda: None, end]
    played.send()
    assert played.sent == [name(first), name(again)]
    assert len(played.store) == 0


def test_half_a_reply_of_which_nothing_comes_is_given_up(played: Played) -> None:
    answer = reply("a")
    played.begin(answer)
    played.put(answer, 1)
    played.send()
    assert not played.sent
    assert 60.0 < played.now < 62.0
    assert len(played.store) == 0


@pytest.mark.process
def test_a_supernode_ends_with_who_started_it(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(
        "import os, subprocess, sys, time\n"
        "program = 'flwr_safedshb.node.flower_patches.supernode'\n"
        "command = [sys.executable, '-m', program]\n"
        "command += ['--insecure', '--superlink', '127.0.0.1:9', '--isolation']\n"
        "command += ['process', '--host', '127.0.0.1', '--port', sys.argv[1]]\n"
        "command += ['--parent-pid', str(os.getpid())]\n"
        "print(subprocess.Popen(command).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, str(tmp_path / "parent.py"), str(free_port())]
    # The package is found as this process finds it, installed or not.
    environment = {**OFFLINE, "FLWR_HOME": str(tmp_path), "PATH": ""}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = Path("/proc") / parent.stdout.readline().strip()
        assert child.exists()
        parent.kill()  # before it is up: it still imports
    deadline = time.monotonic() + HANGS
    while child.exists():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.process
def test_a_supernode_whose_main_loop_has_ended_does_not_stay() -> None:
    """As after an error over an expired certificate: its Runtime API would stay."""
    script = """if True:
        import runpy, sys, threading, time
        import flwr.supernode.cli as cli
        def end():
            threading.Thread(target=time.sleep, args=(3600.0,)).start()
        cli.flower_supernode = end
        sys.argv = ["supernode"]
        module = "flwr_safedshb.node.flower_patches.supernode"
        runpy.run_module(module, run_name="__main__")
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, timeout=HANGS, check=False)
    assert done.returncode == -signal.SIGTERM
