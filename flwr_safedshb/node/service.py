"""A node at work: Flower's SuperNode, and the foreman of its workers.

The SuperNode starts nothing by itself here (isolation mode ``process``) and gives tasks
only to who knows a secret that is made anew at every start. So no other user of the
machine can take this node's work, and no token stands in a list of arguments.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import INFO, WARNING
from pathlib import Path
from types import FrameType

from flwr_safedshb.node.approvals import KEY, Approvals
from flwr_safedshb.node.dispatcher import Foreman
from flwr_safedshb.node.log_tail import Voice
from flwr_safedshb.node.node_file import Connection, NodeFile
from flwr_safedshb.node.ports import is_ours
from flwr_safedshb.node.status_report import Report
from flwr_safedshb.node.worker_pool import Nursery

# A SuperLink without a gate refuses a node for up to a minute after a kill.
_RESTART_SECONDS = 5.0
_STOP_SECONDS = 10.0


class _Stopped(Exception):  # noqa: N818  # what happened
    """Somebody asked the node to stop."""


class NodeService:
    """Serves a federation until it is told to stop.

    Parameters
    ----------
    node : NodeFile
        With a connection, or None to reach a SuperLink without TLS at `insecure`.
    insecure : str, optional
        The address of a SuperLink without TLS, for trials on one machine.
    """

    def __init__(self, node: NodeFile, insecure: str | None = None) -> None:
        if (node.connection is None) == (insecure is None):
            raise ValueError(
                f"{node.path} needs a table [supernode] with superlink, "
                "root-certificates and key"
            )
        self._node, self._insecure = node, insecure
        self.approvals = Approvals.of(node.config.get(KEY))
        folder = node.config.get("state-dir")
        self._report = Report(None if folder is None else Path(str(folder)))

    def run(self) -> None:
        """Serve; returns when the process is told to stop."""
        # Forked first of all: it must see neither key nor secret.
        nursery = Nursery()
        with tempfile.TemporaryDirectory(prefix="safedshb-node-") as folder, _signals():
            secret = secrets.token_bytes(32)
            (Path(folder) / "secret").write_bytes(secret)
            try:
                while True:
                    self._serve(nursery, Path(folder), secret)
                    _log(WARNING, "The SuperNode has ended; it is started again")
                    time.sleep(_RESTART_SECONDS)
            except _Stopped:
                _log(INFO, "Stopped")

    def _serve(self, nursery: Nursery, folder: Path, secret: bytes) -> None:
        """Run a SuperNode and its workers until it ends."""
        import httpx

        from flwr_safedshb.node.flower_patches.runtime_client import SuperNode, acquire

        port = _free_port()
        supernode = SuperNode(f"127.0.0.1:{port}")
        foreman = Foreman(nursery, supernode, self.approvals)
        process = subprocess.Popen(
            self._command(folder, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        voice = Voice(process.stdout)
        try:
            with supernode.tasks(secret) as tasks:
                while not voice.over and process.poll() is None:
                    if voice.pause() == 0.0:
                        try:
                            claim = acquire(tasks) if is_ours(port) else None
                        except httpx.HTTPError:
                            claim = None  # not up yet, or on its way out
                        voice.asked(found=claim is not None)
                        if claim is not None:
                            foreman.assign(claim)
                    foreman.attend(voice.pause(), voice)
                    self._report.tell(foreman.served, foreman.last)
        finally:
            foreman.close()
            _end(process)
            voice.finish()

    def _command(self, folder: Path, port: int) -> list[str]:
        config = folder / "node.toml"
        config.write_text(_toml(self._node.config))
        return [
            *(sys.executable, "-m", "flwr_safedshb.node.flower_patches.supernode"),
            *("--parent-pid", str(os.getpid())),
            *_security(self._node.connection, self._insecure),
            *("--isolation", "process"),
            *("--superexec-auth-secret-file", str(folder / "secret")),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--node-config", str(config)),
        ]


def _security(connection: Connection | None, insecure: str | None) -> list[str]:
    if connection is None:
        return ["--insecure", "--superlink", str(insecure)]
    options = [
        *("--superlink", connection.superlink),
        *("--root-certificates", str(connection.root_certificates)),
        *("--auth-supernode-private-key", str(connection.key)),
    ]
    if connection.trusted_entities is not None:
        options += ["--trusted-entities", str(connection.trusted_entities)]
    return options


def _toml(config: Mapping[str, object]) -> str:
    def written(value: object) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, str):
            # TOML's basic strings escape as JSON's do.
            import json

            return json.dumps(value)
        return repr(value)

    return "".join(f'"{key}" = {written(value)}\n' for key, value in config.items())


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _signals() -> Iterator[None]:
    """Turn a request to stop into an exception, once."""

    def stop(_: int, __: FrameType | None) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise _Stopped

    before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _log(level: int, words: str, *values: object) -> None:
    from flwr.common import log

    log(level, words, *values)


def private_umask() -> None:
    """Let nobody else read what this process and its children write."""
    os.umask(0o077)
