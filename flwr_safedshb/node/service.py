"""A node at work: Flower's SuperNode, and the dispatcher of its workers.

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
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from logging import INFO, WARNING
from pathlib import Path

from flwr_safedshb.node.approvals import KEY, Approvals
from flwr_safedshb.node.dispatcher import Dispatcher
from flwr_safedshb.node.log_tail import LogTail
from flwr_safedshb.node.node_file import NodeFile
from flwr_safedshb.node.node_status import NodeStatus
from flwr_safedshb.node.owner_rules import OwnerRules
from flwr_safedshb.node.sandbox import check_sandbox
from flwr_safedshb.node.stop_request import StopRequest
from flwr_safedshb.node.worker_pool import ForkServer

# A SuperLink without a gate refuses a node for up to a minute after a kill.
_RESTART_SECONDS = 5.0
# In which a SuperNode takes leave of its SuperLink.
_STOP_SECONDS = 2.0
# Linux's table of TCP sockets, and its words for "listens" and 127.0.0.1.
_SOCKETS = Path("/proc/net/tcp")
_LISTEN, _LOOPBACK = "0A", "0100007F"


class NodeService:
    """Serve a federation until told to stop.

    Parameters
    ----------
    node : NodeFile
        With a connection, or without one to reach a SuperLink at `insecure`.
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
        self.approvals = Approvals.parse(node.config.get(KEY))
        self._rules = OwnerRules(node)
        key = [] if node.connection is None else [node.connection.key]
        check_sandbox(node.config, [node.path, *key])
        folder = node.config.get("state-dir")
        self.status = NodeStatus(None if folder is None else Path(str(folder)))
        self._supernode: subprocess.Popen[bytes] | None = None

    def run(
        self, serve_status: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        """Serve; return when the process is told to stop.

        Parameters
        ----------
        serve_status : callable
            Returns a context in which the node's status is served. It is entered after
            the fork server, which must have no threads.
        """
        with tempfile.TemporaryDirectory(prefix="safedshb-node-") as name:
            folder = Path(name)
            # Forked first of all: it must see neither key nor secret.
            fork_server = ForkServer(folder)
            with StopRequest(self._end_now) as stop, serve_status():
                secret = secrets.token_bytes(32)
                (folder / "secret").write_bytes(secret)
                while not stop.is_set:
                    self._serve(fork_server, folder, secret, stop)
                    if not stop.is_set:
                        self.status.num_restarts += 1
                        _log(WARNING, "The SuperNode has ended; it is started again")
                        stop.wait(_RESTART_SECONDS)
                fork_server.close()
        _log(INFO, "Stopped")

    def _serve(
        self, fork_server: ForkServer, folder: Path, secret: bytes, stop: StopRequest
    ) -> None:
        """Run a SuperNode and its workers until it ends, or is to end."""
        import httpx

        from flwr_safedshb.node.flower_patches.runtime_client import (
            Runtime,
            acquire_task,
        )

        port = find_free_port()
        runtime = Runtime(f"127.0.0.1:{port}")
        dispatcher = Dispatcher(fork_server, runtime, self._rules, self.status)
        process = subprocess.Popen(
            self._make_command(folder, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._supernode = process
        assert process.stdout is not None
        tail = LogTail(process.stdout)
        try:
            with runtime.connect_with_secret(secret) as client:
                while not (stop.is_set or tail.is_closed) and process.poll() is None:
                    if tail.poll_delay() == 0.0:
                        try:
                            task = acquire_task(client) if is_own_port(port) else None
                        except httpx.HTTPError:
                            task = None  # not up yet, or on its way out
                        tail.note_poll(found=task is not None)
                        if task is not None:
                            dispatcher.assign(task)
                    dispatcher.poll(tail.poll_delay(), tail, stop)
                    self.status.report()
        finally:
            dispatcher.close()
            _stop(process)
            tail.read_rest()

    def _end_now(self) -> None:
        """End this process and its SuperNode; the workers end with this process."""
        if self._supernode is not None:
            self._supernode.kill()
        os._exit(1)

    def _make_command(self, folder: Path, port: int) -> list[str]:
        # Without the node's config: workers get it with each message, as it is then.
        command = [
            *(sys.executable, "-m", "flwr_safedshb.node.flower_patches.supernode"),
            *("--parent-pid", str(os.getpid())),
            *("--isolation", "process"),
            *("--superexec-auth-secret-file", str(folder / "secret")),
            *("--host", "127.0.0.1", "--port", str(port)),
        ]
        connection = self._node.connection
        if connection is None:
            return [*command, "--insecure", "--superlink", str(self._insecure)]
        command += [
            *("--superlink", connection.superlink),
            *("--root-certificates", str(connection.root_certificates)),
            *("--auth-supernode-private-key", str(connection.key)),
        ]
        if connection.trusted_entities is not None:
            command += ["--trusted-entities", str(connection.trusted_entities)]
        return command


def find_free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def is_own_port(port: int) -> bool:
    """Return True if this user, and nobody else, listens on a port of 127.0.0.1.

    A SuperNode's port is chosen before it listens there, and stands in its arguments.
    So another user of the machine could listen first, and hand out work of their own.
    Where the system does not tell, as outside Linux, it is taken for ours.
    """
    try:
        lines = _SOCKETS.read_text().splitlines()[1:]
    except OSError:
        return True
    here = (f"{_LOOPBACK}:{port:04X}", _LISTEN)
    rows = (line.split() for line in lines)
    return {int(row[7]) for row in rows if (row[1], row[3]) == here} == {os.geteuid()}


def set_private_umask() -> None:
    """Let nobody else read what this process and its children write."""
    os.umask(0o077)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _log(level: int, text: str, *values: object) -> None:
    from flwr.common import log

    log(level, text, *values)
