"""A worker that dies costs the message it was working on, whenever it dies."""

import asyncio
import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.proto.run_pb2 import GetRunRequest, GetRunResponse, Run
from flwr.supernode.runtime.run_clientapp import push_message
from google.protobuf.message import Message as Proto

import flwr_safedshb
from flwr_safedshb.flower import inline_objects as inlining
from flwr_safedshb.flower.compat import set_reply_to
from flwr_safedshb.node.flower_patches import runtime_client
from flwr_safedshb.node.flower_patches.fab import build_bundle
from flwr_safedshb.node.flower_patches.fleet_api import (
    fab_pb2,
    fleet_pb2,
    message_from_proto,
)
from simulations.loopback import OFFLINE, free_port
from simulations.loopback.signing import public_key_pem
from tests.guard import HANGS
from tests.node.gates import RUN, Place, SuperLink, question, visited

APP = Path(flwr_safedshb.__file__).parent / "node" / "template" / "app"
NODE = 5
SECRET = b"s" * 32


class WithApp(SuperLink):
    """A SuperLink that has a run, too."""

    fab = build_bundle(APP)

    def _answer(self, asked: Proto, node: int) -> Proto:
        name = hashlib.sha256(self.fab).hexdigest()
        if isinstance(asked, GetRunRequest):
            run = Run(run_id=RUN, fab_id="me/my-app", fab_version="1.0.0")
            run.fab_hash, run.series_id = name, 1
            return GetRunResponse(run=run)
        if isinstance(asked, fab_pb2.GetFabRequest):
            fab = fab_pb2.Fab(hash_str=name, content=self.fab)
            return fab_pb2.GetFabResponse(fab=fab)
        return super()._answer(asked, node)

    def answered(self) -> list[Message]:
        """Return the replies that have come, without what is in them."""
        pushes = [a for _, a, _ in self.calls]
        return [
            message_from_proto(push.messages_list[0])
            for push in pushes
            if isinstance(push, fleet_pb2.PushMessagesRequest)
        ]


@contextmanager
def supernode(folder: Path, place: Place) -> Iterator[runtime_client.Runtime]:
    """Run a SuperNode that starts nothing by itself."""
    key, port = ec.generate_private_key(ec.SECP384R1()), free_port()
    place.superlink.nodes[public_key_pem(key)] = NODE
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    (folder / "node.key").write_bytes(secret)
    (folder / "secret").write_bytes(SECRET)
    command = [
        *(sys.executable, "-m", "flwr_safedshb.node.flower_patches.supernode"),
        *("--superlink", f"127.0.0.1:{place.port}"),
        *("--root-certificates", str(folder / "gate.crt")),
        *("--auth-supernode-private-key", str(folder / "node.key")),
        *("--isolation", "process", "--host", "127.0.0.1", "--port", str(port)),
        *("--superexec-auth-secret-file", str(folder / "secret")),
    ]
    own = {"FLWR_HOME": str(folder / "flwr"), "PATH": ""}
    environment = {**os.environ, **OFFLINE, **own}
    with (
        (folder / "supernode.log").open("wb") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process,
    ):
        try:
            yield runtime_client.Runtime(f"127.0.0.1:{port}")
        finally:
            process.kill()


def claimed(node: runtime_client.Runtime) -> str:
    """Wait for a task, and return its token."""
    deadline = time.monotonic() + HANGS
    with node.connect_with_secret(SECRET) as client:
        while time.monotonic() < deadline:
            try:
                claim = runtime_client.acquire_task(client)
            except httpx.HTTPError:
                claim = None  # not up yet
            if claim is not None:
                return claim.token
            time.sleep(0.05)
    raise TimeoutError("no task has come")


def answer(node: runtime_client.Runtime, to: str | None = None) -> None:
    """Be a worker that answers the next message, or says to answer another."""
    work = runtime_client.ClientTask(node, claimed(node), lambda *_: None)
    reply = Message(RecordDict(), reply_to=work.message)
    if to is not None:
        set_reply_to(reply, to)
    work.send_reply(reply)
    work.close()


class Died(BaseException):
    """A worker has been killed."""


def die_in_a_reply(work: runtime_client.ClientTask) -> None:
    """Announce a reply, and die before its parts are sent."""

    def killed(*_: object) -> None:
        raise Died

    work._client.PushObject = killed  # type: ignore[assignment]
    large = ArrayRecord(
        [np.zeros(inlining.MAX_OBJECT_BYTES, np.float32)]
    )  # with no inline objects
    work.send_reply(Message(RecordDict({"arrays": large}), reply_to=work.message))


def die_after_a_reply(work: runtime_client.ClientTask) -> None:
    """Send a reply, and die before the task is said to be done."""
    reply = Message(RecordDict(), reply_to=work.message)
    push_message(work._client, reply, work.context)
    raise Died


def die_at_once(work: runtime_client.ClientTask) -> None:
    """Die before the message is pulled."""
    raise Died


def die_before_a_reply(work: runtime_client.ClientTask) -> None:
    """Die while the app works."""
    raise Died


@pytest.mark.process
@pytest.mark.parametrize(
    ("die", "errors"),
    [
        (die_at_once, [True, False]),
        (die_before_a_reply, [True, False]),
        (die_in_a_reply, [True, False]),
        (die_after_a_reply, [False, False]),
    ],
)
def test_it_costs_at_most_its_message(
    tmp_path: Path, die: Callable[[runtime_client.ClientTask], None], errors: list[bool]
) -> None:
    superlink = WithApp()

    def work(node: runtime_client.Runtime) -> None:
        token, heads = claimed(node), [b""]
        if die is not die_at_once:
            dying = runtime_client.ClientTask(
                node, token, lambda head, _: heads.append(head)
            )
            with pytest.raises(Died):
                die(dying)
            dying.close()
        # What a dispatcher does for it.
        runtime_client.fail_task(
            node, token, heads[-1], "the process of the ClientApp has died"
        )
        superlink.waiting[NODE] = [question(NODE, size=4)]
        answer(node)

    async def visit(place: Place) -> None:
        superlink.waiting[NODE] = [question(NODE)]
        with supernode(tmp_path, place) as node:
            await asyncio.to_thread(work, node)
            while len(superlink.answered()) < 2:
                await asyncio.sleep(0.05)

    visited(tmp_path, visit, superlink=superlink)
    assert [reply.has_error() for reply in superlink.answered()] == errors
    asked = {reply.metadata.reply_to_message_id for reply in superlink.answered()}
    assert len(asked) == 2


@pytest.mark.process
def test_an_answer_to_an_earlier_message_is_none_to_this_one(tmp_path: Path) -> None:
    superlink = WithApp()
    asked = [question(NODE, size) for size in (3, 4, 5)]

    def work(node: runtime_client.Runtime) -> None:
        answers = (None, asked[0].metadata.message_id, None)
        for message, to in zip(asked, answers, strict=True):
            superlink.waiting[NODE] = [message]
            answer(node, to)

    async def visit(place: Place) -> None:
        with supernode(tmp_path, place) as node:
            await asyncio.to_thread(work, node)
            while len(superlink.answered()) < 2:
                await asyncio.sleep(0.05)

    visited(tmp_path, visit, superlink=superlink)
    answered = [r.metadata.reply_to_message_id for r in superlink.answered()]
    assert answered == [asked[n].metadata.message_id for n in (0, 2)]
    log = (tmp_path / "supernode.log").read_text()
    assert re.search(r"Failed to send message .*Client error '400", log), log
