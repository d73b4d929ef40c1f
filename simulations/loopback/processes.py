"""Processes that are started, watched, killed and stopped together."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
_START_SECONDS = 60.0
_STOP_SECONDS = 20.0
# Flower stays on this machine: no telemetry, no update check, no installation.
OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}

Value = bool | float | int | str


class Processes:
    """Named processes with a log file each.

    Parameters
    ----------
    folder : Path
        Where they run, and where their logs are.
    environment : mapping
        Theirs, beside this process's own.
    programs : sequence of Path
        Where programs are looked for first.
    """

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        programs: Sequence[Path] = (),
    ) -> None:
        self.folder = folder
        beside = Path(sys.executable).parent
        self.environment = {
            **os.environ,
            **environment,
            # Flower's commands start each other by name.
            "PATH": os.pathsep.join(map(str, [*programs, beside, os.environ["PATH"]])),
        }
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self, name: str, *command: str, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start a process; its output is added to the log of that name."""
        if self.is_running(name):
            raise RuntimeError(f"{name} is running already; kill it first")
        with self.log_path(name).open("ab") as output:
            self._running[name] = subprocess.Popen(
                [self._found(command[0]), *command[1:]],
                env={**self.environment, **(environment or {})},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def told(self, *command: str, timeout: float = 600.0) -> str:
        """Run a command to its end, and return its output.

        Raises
        ------
        RuntimeError
            If it fails, with all that it said.
        """
        done = subprocess.run(
            [self._found(command[0]), *command[1:]],
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode != 0:
            said = f"{done.stdout}{done.stderr}"
            raise RuntimeError(f"{' '.join(command[:3])} failed: {said}")
        return done.stdout

    def answer(self, *command: str) -> dict[str, object]:
        """Run a command of Flower's that answers in JSON, and return the answer."""
        told = self.told(*command, "--format", "json")
        try:
            answer = json.loads(told)
        except json.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict) or not answer.get("success"):
            raise RuntimeError(f"{' '.join(command[:3])} failed: {told}")
        return answer

    def is_running(self, name: str) -> bool:
        """Whether the process was started and has not ended."""
        process = self._running.get(name)
        return process is not None and process.poll() is None

    def wait_for_port(self, name: str, port: int) -> None:
        """Wait until a process listens, or raise with what it said."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self.is_running(name):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"the {name} did not start:\n{self.log(name)}")

    def pid(self, name: str) -> int:
        """Return the number of a process that was started."""
        return self._running[name].pid

    def kill(self, name: str) -> None:
        """Kill a process and all that it has started, without warning."""
        process = self._running.pop(name)
        _signal(process, signal.SIGKILL)
        process.wait()

    def stop(self, name: str) -> None:
        """Send SIGTERM to one process, not to what it started; wait for its end.

        Raises
        ------
        RuntimeError
            If it does not end by itself.
        """
        process = self._running[name]
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{name} ignores SIGTERM:\n{self.log(name)}") from None
        del self._running[name]

    def kill_matching(self, *words: str) -> int:
        """Kill descendants whose command lines have all the words; return how many.

        For what Flower starts in sessions of its own.
        """
        killed = 0
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                command = (entry / "cmdline").read_bytes().decode().split("\0")
                # The home is this federation's own, so no other one is hit.
                mine = f"FLWR_HOME={self.environment['FLWR_HOME']}".encode()
                if mine in (entry / "environ").read_bytes().split(b"\0") and all(
                    any(word in part for part in command) for word in words
                ):
                    os.kill(int(entry.name), signal.SIGKILL)
                    killed += 1
        return killed

    def log(self, name: str, characters: int = 4000) -> str:
        """Return the end of a process's output."""
        return self.log_path(name).read_text(errors="replace")[-characters:]

    def log_path(self, name: str) -> Path:
        """Return the file that a process's output is in."""
        return self.folder / f"{name}.log"

    def close(self) -> None:
        """Stop every process that was started here."""
        processes = list(self._running.values())
        self._running.clear()
        for process in reversed(processes):
            _signal(process, signal.SIGTERM)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
            # The leader is gone, and what it started may not be.
            _signal(process, signal.SIGKILL)
            process.wait()

    def _found(self, command: str) -> str:
        path = shutil.which(command, path=self.environment["PATH"])
        if path is None:
            raise FileNotFoundError(
                f"{command} is not installed beside {sys.executable}"
            )
        return path


class Termination:
    """While it lasts, SIGTERM ends this process as Ctrl-C does: contexts are left."""

    def __init__(self) -> None:
        # Only the main thread may say what a signal does.
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.signal(signal.SIGTERM, self._leave)

    def over(self) -> None:
        """Let SIGTERM do what it did before."""
        if self._main:
            signal.signal(signal.SIGTERM, self._before)

    @staticmethod
    def _leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)


def toml(values: Mapping[str, Value]) -> str:
    """Return entries as Flower's options take them: TOML on one line."""
    return " ".join(f"{key}={json.dumps(value)}" for key, value in values.items())


def free_port() -> int:
    """Return a port of the loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal a process and those it started: each has a session of its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
