"""A worker pool: a process for each run, loaded once for all its messages.

Flower starts a process for every message: it imports torch, unpacks the app, reads the
data and builds the model, seconds of work before a step of milliseconds. Here three
kinds of processes share that work:

- the *dispatcher* knows the SuperNode's secret. It asks for tasks and hands each to the
  worker of its run;
- the *fork server* has imported everything and seen nothing: no secret, no message, no
  example. It forks workers;
- a *worker* serves the messages of one run, one after the other. The first brings the
  app, which must be one that the node's owner has approved before it is unpacked.

Formal guarantees
-----------------
- A worker has never seen a message of another run.
- A worker that dies costs the message it was working on, which is answered with an
  error at once.
- Workers end when their run has been silent for a while, and with the dispatcher.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import traceback
from contextlib import suppress
from logging import ERROR, WARNING
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from flwr_safedshb.node.owner_rules import Permission
from flwr_safedshb.node.sandbox import SANDBOX, confine
from flwr_safedshb.sanitize import escape

if TYPE_CHECKING:
    from flwr.app import Metadata
    from flwr.clientapp import ClientApp

    from flwr_safedshb.node.flower_patches.runtime_client import ClientTask

_IMPORTED = ("flwr_safedshb.app", "flwr_safedshb.node.flower_patches.runtime_client")
_MAX_PACKET = 2**20
_READY = b"ready"


def send_packet(link: socket.socket, packet: dict[str, object]) -> None:
    """Send a packet to the other side of a link."""
    link.sendall(json.dumps(packet).encode())


def receive_packet(link: socket.socket) -> dict[str, object] | None:
    """Receive a packet; None if the other side is gone."""
    received = link.recv(_MAX_PACKET)
    return json.loads(received) if received else None


def _make_link() -> tuple[socket.socket, socket.socket]:
    # Packets: what is sent at once arrives at once.
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class ForkServer:
    """A process that has imported everything, and forks workers that begin with that.

    Make it before anything secret is read.

    Parameters
    ----------
    folder : Path
        Where workers put what they unpack; the caller removes it in the end.
    """

    def __init__(self, folder: Path) -> None:
        self._link, theirs = _make_link()
        self._ready = False
        self._pid = os.fork()
        if self._pid == 0:
            self._link.close()
            _run_fork_server(theirs, folder)
        with suppress(OSError):  # whoever of the two is first
            os.setpgid(self._pid, self._pid)
        theirs.close()

    def close(self) -> None:
        """End the fork server and all workers, whatever they are doing."""
        self._link.close()
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def fork_worker(self) -> socket.socket:
        """Fork a worker and return a link to it.

        Raises
        ------
        RuntimeError
            If the fork server could not import what workers need; it has said why.
        """
        if not self._ready:
            self._ready = self._link.recv(64) == _READY
        if not self._ready:
            raise RuntimeError("workers cannot be started: an import has failed")
        mine, theirs = _make_link()
        with theirs:
            socket.send_fds(self._link, [b"worker"], [theirs.fileno()])
        return mine


def _run_fork_server(link: socket.socket, folder: Path) -> NoReturn:
    """Import, and fork a worker for every link that comes.

    When the dispatcher is gone, all workers are ended, also those that still work.
    """
    os.setpgid(0, 0)  # the workers' group
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forked
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the dispatcher acts upon it
        for module in _IMPORTED:
            importlib.import_module(module)
        link.sendall(_READY)
        while True:
            received, links, _, _ = socket.recv_fds(link, 64, 1)
            if not received:
                break
            if os.fork() == 0:
                link.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _run_worker(socket.socket(fileno=links[0]), folder)
            for number in links:
                os.close(number)
    except Exception:
        traceback.print_exc()
    finally:
        os.killpg(0, signal.SIGKILL)
        os._exit(0)


def _run_worker(link: socket.socket, folder: Path) -> NoReturn:
    """Be the worker of one run."""
    code = 1
    try:
        with tempfile.TemporaryDirectory(prefix="run-", dir=folder) as home:
            # Unpacked where only this worker looks, and gone with it.
            os.environ["FLWR_HOME"] = os.environ["TMPDIR"] = tempfile.tempdir = home
            worker = Worker(link, home)
            while (packet := receive_packet(link)) is not None:
                worker.handle_task(packet)
        code = 0
    except OSError:
        code = 0  # the dispatcher is gone
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _describe_message(metadata: Metadata) -> str:
    """Return what a message is, such as ``round 3 (train)``."""
    # Chosen by the server, and printed on the node's terminal.
    group, kind = escape(metadata.group_id)[:20], escape(metadata.message_type)[:20]
    return f"round {group} ({kind})" if group else kind


class Worker:
    """Serve one run: its app is loaded with the first message."""

    def __init__(self, link: socket.socket, home: str) -> None:
        self._link, self._home = link, home
        self._has_begun = False
        self._app: ClientApp | None = None
        self._app_hash = ""

    def handle_task(self, packet: dict[str, object]) -> None:
        """Work on one task, and tell the dispatcher when it is done."""
        from flwr.common import log

        from flwr_safedshb.flower.compat import ErrorCode
        from flwr_safedshb.node.flower_patches.runtime_client import ClientTask, Runtime

        def on_message(head: bytes, metadata: Metadata) -> None:
            about = _describe_message(metadata)
            send_packet(self._link, {"head": head.hex(), "about": about})

        runtime = Runtime(str(packet["address"]))
        permission = Permission(packet["config"], packet["refusal"])  # type: ignore[arg-type]
        # Before there is another thread, and before anything of the app is here.
        if permission.config.get(SANDBOX) is True and not self._has_begun:
            confine(permission.config, self._home, runtime.port)
        self._has_begun = True
        task = ClientTask(runtime, str(packet["token"]), on_message)
        try:
            refusal = self._find_refusal(task.bundle.hash, permission)
            if refusal is not None:
                log(WARNING, "Refused: %s", refusal)
                task.send_error(ErrorCode.INVALID_FAB, refusal)
            else:
                task.context.node_config = permission.config
                self._run_app(task)
        finally:
            task.close()
        send_packet(self._link, {"done": True})

    def _find_refusal(self, bundle_hash: str, permission: Permission) -> str | None:
        """Return why an app must not run, before anything of it is unpacked."""
        if self._app_hash and bundle_hash != self._app_hash:
            return "the run has changed its app on its way"
        return permission.find_refusal(bundle_hash)

    def _run_app(self, task: ClientTask) -> None:
        from flwr.common import log

        from flwr_safedshb.flower.compat import ErrorCode
        from flwr_safedshb.node.flower_patches.runtime_client import LoadClientAppError

        try:
            if self._app is None:
                self._app = task.bundle.load()
                self._app_hash = task.bundle.hash
            reply = self._app(message=task.message, context=task.context)
        except LoadClientAppError as error:
            log(ERROR, "The app cannot be loaded", exc_info=error)
            task.send_error(
                ErrorCode.LOAD_CLIENT_APP_EXCEPTION,
                "the ClientApp could not be loaded; the log of this node says why",
            )
        except Exception as error:
            log(ERROR, "The ClientApp raised an exception", exc_info=error)
            reason = f"{type(error)}:<'{error}'>"
            task.send_error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason)
        else:
            task.send_reply(reply)
