"""Hostile programs at a gate, the checks of their suite, and a short form of it."""

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives import serialization

from flwr_safedshb.node.flower_patches import fleet_api
from flwr_safedshb.node.flower_patches.runtime_client import Runtime, acquire_task
from flwr_safedshb.node.gate.handlers import NodeSession
from flwr_safedshb.node.gate.limits import Limits
from flwr_safedshb.node.gate.request import Request, Response
from flwr_safedshb.privacy.ledger.ledger import Ledger
from simulations.chaos.app import TRACE
from simulations.chaos.hostile import attacks
from simulations.chaos.hostile.attacks import ATTACKS, SERVER, Scene
from simulations.chaos.hostile.node import FleetNode
from simulations.chaos.hostile.report import (
    AttackOutcome,
    check_outcomes,
    make_markdown,
)
from simulations.chaos.hostile.stranger import KINDS, attack
from simulations.chaos.hostile.suite import (
    attack_federation,
    check_attacked,
    train_silently,
)
from simulations.chaos.problem import PLAN
from simulations.chaos.trace import append_entry
from simulations.chaos.trial import FaultTrial
from simulations.loopback import Deployment
from simulations.loopback.signing import Key, load_private_key, public_key_pem
from tests.node.gates import RUN, Place, question, visited
from tests.node.test_local_users import NOBODY, as_root, trespass
from tests.simulations.chaos.test_chaos import SEED, SESSION, reply, trial

pytestmark = pytest.mark.federation

__all__ = ["trial"]

ME, OTHER = 5, 6


def key_file(path: Path, key: Key) -> Path:
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
    )
    return path


@pytest.mark.parametrize("name", ATTACKS)
def test_of_an_insider_only_its_own_failure_reaches_the_superlink(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attacks, "HELD_SECONDS", 0.3)
    monkeypatch.setattr(attacks, "CONNECTIONS", 40)
    trace = tmp_path / "trace"
    for_me, for_other = question(ME), question(OTHER)
    sent = {"id": for_other.metadata.message_id, "node": OTHER, "step": 0}
    append_entry(trace, {**sent, "session": "s", "model": []})

    def misbehave(node: FleetNode) -> None:
        node.activate_node()
        asked = node.pull_message()
        assert asked is not None
        ATTACKS[name](Scene(node, asked, [OTHER], trace))
        node.send_failure(asked)

    async def visit(place: Place) -> None:
        async with place.node(OTHER) as other:
            place.superlink.waiting = {ME: [for_me], OTHER: [for_other]}
            key = key_file(tmp_path / "key", _new_key())
            place.superlink.nodes[
                public_key_pem(load_private_key(key.read_bytes()))
            ] = ME
            address = f"127.0.0.1:{place.port}"
            node = FleetNode(address, tmp_path / "gate.crt", key, ME)
            await asyncio.to_thread(misbehave, node)
            # The other is still there, and given what is its own.
            (given,) = (await other.pull()).messages_list
            assert given.metadata.dst_node_id == OTHER

    limits = Limits(hold_seconds=0.2, poll_seconds=0.02)
    superlink = visited(tmp_path, visit, limits)
    (pushed,) = [r for n, r, _ in superlink.calls if n == "push-messages"]
    (message,) = pushed.messages_list
    about = message.metadata
    assert message.HasField("error")
    assert (about.src_node_id, about.dst_node_id) == (ME, SERVER)
    assert about.reply_to_message_id == for_me.metadata.message_id
    assert about.run_id == RUN
    left = [
        fleet_api.claimed_node_id(r)
        for n, r, _ in superlink.calls
        if n == "deactivate-node"
    ]
    assert {*left} <= {ME}


def _new_key() -> Key:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def test_an_insider_calls_again_over_a_new_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy may be started again in between."""

    async def visit(place: Place) -> None:
        key = key_file(tmp_path / "key", _new_key())
        place.superlink.nodes[public_key_pem(load_private_key(key.read_bytes()))] = ME
        address = f"127.0.0.1:{place.port}"
        node = FleetNode(address, tmp_path / "gate.crt", key, ME)
        await asyncio.to_thread(node.activate_node)
        answered, cut = place.gate.handle_request, iter((True, True, False))

        async def hang_up(call: Request, session: NodeSession) -> Response:
            if next(cut):
                place.cut(call)
                raise EOFError
            return await answered(call, session)

        monkeypatch.setattr(place.gate, "handle_request", hang_up)
        assert (await asyncio.to_thread(node.send_heartbeat)).status_code == 200

    names = visited(tmp_path, visit).names()
    assert names == ["activate-node", "send-node-heartbeat"]


@pytest.mark.process
@pytest.mark.parametrize("kind", KINDS)
def test_nodes_are_served_while_strangers_come(kind: str, tmp_path: Path) -> None:
    async def visit(place: Place) -> None:
        async with place.node(ME) as node:
            address = f"127.0.0.1:{place.port}"
            trusted = str(tmp_path / "gate.crt")
            strangers = asyncio.create_task(attack(kind, address, 1.5, trusted))
            while not strangers.done():
                assert not (await node.pull()).messages_list
                async with place.node(OTHER) as other:
                    assert not (await other.pull()).messages_list
            await strangers

    limits = Limits(hold_seconds=0.05, poll_seconds=0.02)
    names = visited(tmp_path, visit, limits, proxied=True).names()
    assert {*names} <= {"activate-node", "pull-messages"}


OUTCOME = AttackOutcome("a", "A.", "400 no", 0, 0, 0.2, 0.1, 9, 0, 90.0)


def test_a_training_that_went_well_has_nothing_wrong(trial: FaultTrial) -> None:
    assert check_attacked(trial, 0.0) == []
    assert check_outcomes([OUTCOME]) == []


def bill_a_node(trial: FaultTrial) -> None:
    with Ledger(trial.federation.state_dir(1) / "safedshb.sqlite") as ledger:
        ledger.charge(PLAN, run=SESSION)


def take_a_reply_twice(trial: FaultTrial) -> None:
    append_entry(trial.folder / TRACE, reply(2, 1))


def take_a_strangers_reply(trial: FaultTrial) -> None:
    append_entry(trial.folder / TRACE, reply(2, 1, to="unasked"))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (bill_a_node, "node 1 was asked 2 times and charged 3 steps"),
        (take_a_reply_twice, "two replies to '2-1' were taken"),
        (take_a_strangers_reply, "a reply to 'unasked' was taken"),
    ],
)
def test_each_check_of_the_training_can_fail(
    trial: FaultTrial, spoil: Callable[[FaultTrial], None], told: str
) -> None:
    spoil(trial)
    assert told in check_attacked(trial, 0.0)


def test_each_check_of_waiting_and_memory_can_fail(trial: FaultTrial) -> None:
    assert any("0.5 off" in text for text in check_attacked(trial, 0.5))
    for change in ({"slowest": 0.31}, {"failed_calls": 1}, {"memory": 201.0}):
        (told,) = check_outcomes([replace(OUTCOME, **change)])
        assert told.startswith("a: ")


def test_the_table_has_each_attack_at_its_worst() -> None:
    again = replace(OUTCOME, slowest=0.3, memory=99.0, lost_rounds=1)
    page = make_markdown([OUTCOME, again, replace(OUTCOME, attack="b", seen="")])
    assert page.splitlines()[2:] == [
        "| A | 400 no | 1 | 0 | 0.30 s (0.10 s) | 99 MiB |",
        "| A | nothing, or a refusal that is counted | 0 | 0 | 0.20 s (0.10 s) "
        "| 90 MiB |",
    ]


def test_the_model_of_a_silent_node_is_not_that_of_an_adversary() -> None:
    assert not (train_silently(SEED, 2) == train_silently(SEED + 1, 2)).any()


@pytest.fixture
def place() -> Iterator[Path]:
    """Return a folder that other users can come to."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


SHORT = [
    "instruct-server+instruct-node+answer-for-another",
    "poison-record+reply-twice",
]


@as_root
@pytest.mark.process
def test_short_suite_with_a_second_user_on_the_nodes_machine(place: Path) -> None:
    """A hostile node in a federation; and another user asks nodes for their work."""
    seen: list[str] = []

    def visit(federation: Deployment) -> None:
        seen.extend(_asked_as_nobody(port) for port in runtime_ports(federation))

    report = attack_federation(place / "run", SEED, SHORT, 0, [], 0.0, print, visit)
    assert report.wrong == []
    assert [row.lost_rounds + row.wasted_steps for row in report.rows] == [0] * 2
    said = " ".join(row.seen for row in report.rows)
    assert said.count("404 a message that this node was not given") == 3
    assert said.count("400 a second reply to one message") == 2
    assert len(seen) == 4
    assert {*seen} == {"refused"}
    readable, changeable = trespass(place / "run" / "federation")
    mine = re.compile(r"node-\d/|.*\.key|.*secret")
    assert not [name for name in {*readable, *changeable} if mine.match(name)]


def runtime_ports(federation: Deployment) -> list[int]:
    """Return where the SuperNodes of a federation hand out work."""
    home = f"FLWR_HOME={federation.folder / 'flwr'}".encode()
    ports = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            mine = home in (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if mine and "--superexec-auth-secret-file" in words:
            ports.append(int(words[words.index("--port") + 1]))
    return ports


def _asked_as_nobody(port: int) -> str:
    """Ask for work as a user who does not know the secret."""
    read, write = os.pipe()
    if os.fork() == 0:
        said = "got through"
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            with Runtime(f"127.0.0.1:{port}").connect_with_secret(b"x" * 32) as client:
                acquire_task(client)
        except httpx.HTTPStatusError:
            said = "refused"
        except Exception as error:
            said = repr(error)
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        said = answer.read().decode()
    os.wait()
    return said
