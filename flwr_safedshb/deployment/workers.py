"""Start a node's client processes from one that has imported everything already.

Flower starts a process for every message. Most of what such a process does is to import
torch: seconds of work before a step of milliseconds, and on a busy machine more than
the 30 s after which Flower gives a process up and starts the next one. Where the
program ``flwr-clientapp`` of ``deploy/warm`` comes before Flower's own in the PATH, a
SuperNode's first message starts a process that imports once and then forks one process
for every further message: as isolated from each other as before, and there at once.

Formal guarantees
-----------------
- The process that forks has seen no message, no key and no example.
- Only its own user can reach it, and it ends with the process that it serves.
- Where the imports fail, no message is run: the program ends with the error.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_SECONDS = 1.0
_MAX_REQUEST = 256 * 1024
_OUTPUTS = (1, 2)

Program = Callable[[], None]


def flower() -> Program:
    """Import what a client needs, and return Flower's own flwr-clientapp."""
    import flwr_safedshb.client.client  # noqa: F401
    from flwr_safedshb.flower.compat import client_process

    return client_process()


def start(folder: Path, served: int, imported: Callable[[], Program] = flower) -> None:
    """Run the program with this process's arguments, environment and outputs.

    In a process that the warm one forks; for want of a warm one here, and then one is
    made for the next time.

    Parameters
    ----------
    folder : Path
        Of sockets; only this user may enter it.
    served : int
        Id of the process that has the program run.
    imported : callable
        Imports what to run, and returns it.
    """
    name, directory = f"{served}.sock", Path.cwd()
    with _socket() as link:
        try:
            # By a relative name: a socket's may have no more than a hundred letters.
            os.chdir(folder)
            link.connect(name)
        except OSError as error:
            if isinstance(error, ConnectionRefusedError):
                os.unlink(name)  # of a process that was killed
            program = imported()
            if os.fork() == 0:
                _warm_up(name, served, program)
        else:
            request = [sys.argv, dict(os.environ), str(directory)]
            socket.send_fds(link, [json.dumps(request).encode()], list(_OUTPUTS))
            return
    os.chdir(directory)
    program()


def _warm_up(name: str, served: int, program: Program) -> None:
    """Serve with all that is imported; never returns."""
    try:
        # What it was started with is the first program's, and may be waited for.
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, *_OUTPUTS):
            os.dup2(nothing, number)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forked
        with _socket() as link, suppress(OSError):  # another was faster
            # Under its name only once it listens.
            mine = f"{name}.{os.getpid()}"
            link.bind(mine)
            link.listen(64)
            try:
                os.link(mine, name)
            finally:
                os.unlink(mine)
            _serve(link, served, program)
            os.unlink(name)
    finally:
        os._exit(0)


def _serve(link: socket.socket, served: int, program: Program) -> None:
    link.settimeout(_SECONDS)
    while _exists(served):
        with suppress(TimeoutError):
            visitor, _ = link.accept()
            with visitor:
                visitor.settimeout(_SECONDS)
                content, outputs, _, _ = socket.recv_fds(visitor, _MAX_REQUEST, 2)
            if content and os.fork() == 0:
                link.close()
                _become(content, outputs, program)
            for output in outputs:
                os.close(output)


def _become(content: bytes, outputs: list[int], program: Program) -> None:
    """Be the process that was asked for; never returns."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for output, number in zip(outputs, _OUTPUTS, strict=True):
            os.dup2(output, number)
        arguments, environment, directory = json.loads(content)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        sys.argv = arguments
        program()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _socket() -> socket.socket:
    # What is sent at once arrives at once.
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    """Be flwr-clientapp, for the process that started this one."""
    folder = Path(os.environ.get("FLWR_HOME", Path.home() / ".flwr")) / "warm"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    start(folder, os.getppid())


if __name__ == "__main__":
    main()
