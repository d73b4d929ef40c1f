"""A SuperLink and SuperNodes on this machine's loopback, from start to stop."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).resolve().parent.parent
_NAME = "loopback"
_START_SECONDS = 60.0
_STOP_SECONDS = 20.0
# Flower stays on this machine: no telemetry, no update check, no installation.
OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}

Value = bool | float | int | str


class Deployment:
    """Processes of a federation; leave the context to stop them all.

    Parameters
    ----------
    folder : Path
        Keeps Flower's own files, the logs, and for node i its ``state-dir`` node-i.
    num_nodes : int
    node_config : mapping
        Further entries of every node's config.
    app : Path
        The Flower app to run; by default this repository.
    virtual : bool
        Let the SuperLink simulate the nodes, with Ray, in place of SuperNodes.
    """

    def __init__(
        self,
        folder: Path,
        num_nodes: int,
        node_config: Mapping[str, Value] | None = None,
        app: Path = ROOT,
        virtual: bool = False,
    ) -> None:
        self.folder = folder
        self.app = app
        self._node_config = dict(node_config or {})
        self._num_nodes = num_nodes
        self._virtual = virtual
        self._port = free_port()
        self._environment = {
            **os.environ,
            **OFFLINE,
            "FLWR_HOME": str(folder / "flwr"),
            # Flower's commands start each other by name.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> None:
        home = self.folder / "flwr"
        home.mkdir(parents=True)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{_NAME}"\n\n[superlink.{_NAME}]\n'
            f'address = "127.0.0.1:{self._port}"\ninsecure = true\n'
        )
        self._spawn(
            "superlink",
            "flower-superlink",
            "--insecure",
            "--disable-runtime-dependency-installation",
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *(["--simulation"] if self._virtual else []),
        )
        self._wait_for_port()
        if not self._virtual:
            for index in range(self._num_nodes):
                self.start_node(index)

    def start_node(self, index: int) -> None:
        """Start SuperNode `index`, or start it again after `kill`."""
        config: dict[str, Value] = {
            "partition-id": index,
            "num-partitions": self._num_nodes,
            "state-dir": str(self.state_dir(index)),
            **self._node_config,
        }
        self._spawn(
            f"node-{index}",
            "flower-supernode",
            "--insecure",
            *("--superlink", f"127.0.0.1:{self._port}"),
            *("--host", "127.0.0.1", "--port", str(free_port())),
            *("--node-config", toml(config)),
        )

    def state_dir(self, index: int) -> Path:
        """Return where node `index` keeps its ledger."""
        return self.folder / f"node-{index}"

    def kill(self, name: str) -> None:
        """Kill a process and all that it has started: ``superlink`` or ``node-<i>``."""
        process = self._processes.pop(name)
        _signal(process, signal.SIGKILL)
        process.wait()

    def submit(self, run_config: Mapping[str, Value]) -> str:
        """Start a run and return its id."""
        virtual = {"num-supernodes": self._num_nodes, "client-resources-num-cpus": 1}
        answer = self._flwr(
            "run",
            str(self.app),
            _NAME,
            *("--run-config", toml(run_config)),
            *(["--federation-config", toml(virtual)] if self._virtual else []),
            *("--format", "json"),
        )
        return str(answer["run-id"])

    def status(self, run_id: str) -> str:
        """Return the status of a run, such as ``running`` or ``finished:completed``."""
        answer = self._flwr("ls", _NAME, "--run-id", run_id, "--format", "json")
        runs = answer["runs"]
        assert isinstance(runs, list)
        return str(runs[0]["status"])

    def run(self, run_config: Mapping[str, Value], timeout: float) -> None:
        """Run to the end, or raise with the end of the server's log."""
        self.wait(self.submit(run_config), timeout)

    def wait(self, run_id: str, timeout: float) -> None:
        """Wait for the end of a run, or raise with the end of the server's log."""
        deadline = time.monotonic() + timeout
        while not (status := self.status(run_id)).startswith("finished"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"run {run_id} is {status} after {timeout:g} s")
            time.sleep(2.0)
        if status != "finished:completed":
            raise RuntimeError(f"run {run_id} is {status}:\n{self.log('superlink')}")

    def log(self, name: str, characters: int = 4000) -> str:
        """Return the end of a process's output."""
        return self._log_path(name).read_text(errors="replace")[-characters:]

    def close(self) -> None:
        """Stop every process that was started here."""
        processes = list(self._processes.values())
        self._processes.clear()
        for process in reversed(processes):
            _signal(process, signal.SIGTERM)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
            # The leader is gone, and what it started may not be.
            _signal(process, signal.SIGKILL)
            process.wait()

    def _spawn(self, name: str, command: str, *arguments: str) -> None:
        with self._log_path(name).open("ab") as output:
            self._processes[name] = subprocess.Popen(
                [self._found(command), *arguments],
                env=self._environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _log_path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _found(self, command: str) -> str:
        path = shutil.which(command, path=self._environment["PATH"])
        if path is None:
            raise FileNotFoundError(
                f"{command} is not installed beside {sys.executable}"
            )
        return path

    def _flwr(self, *arguments: str) -> dict[str, object]:
        done = subprocess.run(
            [self._found("flwr"), *arguments],
            env=self._environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        try:
            answer = json.loads(done.stdout)
        except json.JSONDecodeError:
            answer = {"success": False}
        if not isinstance(answer, dict) or not answer.get("success"):
            raise RuntimeError(f"flwr {arguments[0]}: {done.stdout}{done.stderr}")
        return answer

    def _wait_for_port(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._processes["superlink"].poll() is not None:
                break
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"the SuperLink did not start:\n{self.log('superlink')}")


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
