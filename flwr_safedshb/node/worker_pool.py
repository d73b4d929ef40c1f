"""Processes that train on a node: one for each run, loaded once for all its messages.

Flower starts a process for every message: it imports torch, unpacks the app, reads the
data and builds the model, seconds of work before a step of milliseconds. Here three
kinds of processes share that work:

- the *foreman* knows the SuperNode's secret. It asks for tasks and hands each to the
  worker of its run;
- the *nursery* has imported everything and seen nothing: no secret, no message, no
  example. It forks workers;
- a *worker* serves the messages of one run, one after the other. The first brings the
  app, which must be one that the node's owner has approved before it is unpacked.

Formal guarantees
-----------------
- A worker has never seen a message of another run.
- A worker that dies costs the message it was working on, which is answered with an
  error at once.
- Workers end when their run has been silent for a while, and with the foreman.
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
from logging import ERROR, WARNING
from typing import TYPE_CHECKING

from flwr_safedshb.node.approvals import Approvals
from flwr_safedshb.sanitize import escape

if TYPE_CHECKING:
    from flwr.app import Metadata

    from flwr_safedshb.node.flower_patches.runtime_client import Bundle

_IMPORTED = ("flwr_safedshb.client", "flwr_safedshb.node.flower_patches.runtime_client")
_MAX_WORDS = 2**20
_READY = b"ready"

Words = dict[str, object]


def _pair() -> tuple[socket.socket, socket.socket]:
    # What is sent at once arrives at once.
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(link: socket.socket, words: Words) -> None:
    """Say something to the other side of a link."""
    link.sendall(json.dumps(words).encode())


def receive(link: socket.socket) -> Words | None:
    """Return what was said, or None if nobody is there any more."""
    told = link.recv(_MAX_WORDS)
    return json.loads(told) if told else None


class Nursery:
    """A process that has imported everything, and forks workers that begin with that.

    Make it before anything secret is read.
    """

    def __init__(self) -> None:
        self._link, theirs = _pair()
        self._ready = False
        if os.fork() == 0:
            self._link.close()
            _nurse(theirs)
        theirs.close()

    def worker(self) -> socket.socket:
        """Return a link to a new worker.

        Raises
        ------
        RuntimeError
            If the nursery could not import what workers need; it has said why.
        """
        if not self._ready:
            self._ready = self._link.recv(64) == _READY
        if not self._ready:
            raise RuntimeError("workers cannot be started: an import has failed")
        mine, theirs = _pair()
        with theirs:
            socket.send_fds(self._link, [b"worker"], [theirs.fileno()])
        return mine


def _nurse(link: socket.socket) -> None:
    """Import, and fork a worker for every link that comes; never returns."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forked
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the foreman's to act upon
        for module in _IMPORTED:
            importlib.import_module(module)
        link.sendall(_READY)
        while True:
            told, links, _, _ = socket.recv_fds(link, 64, 1)
            if not told:
                break
            if os.fork() == 0:
                link.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _serve(socket.socket(fileno=links[0]))
            for number in links:
                os.close(number)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)


def _serve(link: socket.socket) -> None:
    """Be the worker of one run; never returns."""
    code = 1
    try:
        with tempfile.TemporaryDirectory(prefix="safedshb-run-") as home:
            # Unpacked where only this worker looks, and gone with it.
            os.environ["FLWR_HOME"] = home
            worker = Worker(link)
            while (words := receive(link)) is not None:
                worker.work(words)
        code = 0
    except OSError:
        code = 0  # the foreman is gone
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _about(metadata: Metadata) -> str:
    """Return what a message is, such as ``round 3 (train)``."""
    # Words of the server's, for the terminal of the node.
    group, kind = escape(metadata.group_id)[:20], escape(metadata.message_type)[:20]
    return f"round {group} ({kind})" if group else kind


class Worker:
    """Serves one run: its app is loaded with the first message."""

    def __init__(self, link: socket.socket) -> None:
        from flwr.clientapp import ClientApp

        self._link = link
        self._app: ClientApp | None = None
        self._loaded = ""

    def work(self, words: Words) -> None:
        """Work on one task, and say when it is done."""
        from flwr.common import log

        from flwr_safedshb.node.flower_patches.runtime_client import SuperNode, Work

        def seen(head: bytes, metadata: Metadata) -> None:
            send(self._link, {"head": head.hex(), "about": _about(metadata)})

        work = Work(SuperNode(str(words["address"])), str(words["token"]), seen)
        try:
            approvals = Approvals.of(words["approved"])
            if (reason := self._unwanted(work.bundle, approvals)) is not None:
                log(WARNING, "Refused: %s", reason[1])
                work.refuse(*reason)
            else:
                self._answer(work)
        finally:
            work.close()
        send(self._link, {"done": True})

    def _unwanted(self, bundle: Bundle, approvals: Approvals) -> tuple[int, str] | None:
        """Say why a bundle is not run; before anything of it is unpacked."""
        from flwr_safedshb.flower.compat import ErrorCode

        if self._loaded and bundle.hash != self._loaded:
            return ErrorCode.INVALID_FAB, "the run has changed its app on its way"
        if not approvals.allow(bundle.hash):
            return ErrorCode.INVALID_FAB, approvals.refusal(bundle.hash)
        return None

    def _answer(self, work: object) -> None:
        from flwr.common import log

        from flwr_safedshb.flower.compat import ErrorCode
        from flwr_safedshb.node.flower_patches.runtime_client import (
            LoadClientAppError,
            Work,
        )

        assert isinstance(work, Work)
        try:
            if self._app is None:
                self._app = work.bundle.load()
                self._loaded = work.bundle.hash
            reply = self._app(message=work.message, context=work.context)
        except LoadClientAppError as error:
            log(ERROR, "The app cannot be loaded", exc_info=error)
            work.refuse(
                ErrorCode.LOAD_CLIENT_APP_EXCEPTION,
                "the ClientApp could not be loaded; the log of this node says why",
            )
        except Exception as error:
            log(ERROR, "The ClientApp raised an exception", exc_info=error)
            work.refuse(
                ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
                f"{type(error)}:<'{error}'>",
            )
        else:
            work.finish(reply)
