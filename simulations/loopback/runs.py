"""The runs that an operator submits to a federation, and what becomes of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import INFO
from pathlib import Path

from simulations.loopback.processes import Processes, Value, toml
from simulations.loopback.watch import LOG, Watch

# The name of the SuperLink in Flower's own configuration.
NAME = "loopback"
# To ask for a run's status starts a process that costs more than a step of training.
_STATUS_SECONDS = 4.0


class Runs:
    """Runs on the SuperLink that these processes know as `NAME`.

    Parameters
    ----------
    processes : Processes
    app : Path
        The Flower app to run.
    num_nodes : int
    virtual : bool
        Whether the SuperLink simulates the nodes.
    """

    def __init__(
        self, processes: Processes, app: Path, num_nodes: int, virtual: bool
    ) -> None:
        self.app = app
        self._processes = processes
        self._num_nodes = num_nodes
        self._virtual = virtual

    def submit(self, run_config: Mapping[str, Value], app: Path | None = None) -> str:
        """Start a run, of the federation's app or of another, and return its id."""
        virtual = {"num-supernodes": self._num_nodes, "client-resources-num-cpus": 1}
        answer = self._processes.answer(
            *("flwr", "run", str(app or self.app), NAME),
            *("--run-config", toml(run_config)),
            *(["--federation-config", toml(virtual)] if self._virtual else []),
        )
        return str(answer["run-id"])

    def status(self, run_id: str) -> str:
        """Return the status of a run, such as ``running`` or ``finished:completed``."""
        runs = self._processes.answer("flwr", "ls", NAME, "--run-id", run_id)["runs"]
        assert isinstance(runs, list)
        return str(runs[0]["status"])

    def run_log(self, run_id: str) -> str:
        """Return what the ServerApp of a run has logged."""
        return self._processes.told("flwr", "log", run_id, NAME, "--show")

    def run(self, run_config: Mapping[str, Value], timeout: float) -> None:
        """Run to the end, or raise with the log of the ServerApp."""
        LOG.info("submitting the run")
        self.wait(self.submit(run_config), timeout)

    def wait(self, run_id: str, timeout: float) -> None:
        """Wait for the end of a run, or raise with the log of the ServerApp."""
        deadline = time.monotonic() + timeout
        with self._watched(run_id) as watch:
            while not (status := self.status(run_id)).startswith("finished"):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"run {run_id} is {status} after {timeout:g} s")
                until = time.monotonic() + _STATUS_SECONDS
                while time.monotonic() < until:
                    if watch is not None:
                        LOG.info(watch.words())
                    time.sleep(_STATUS_SECONDS / 8)
        if status != "finished:completed":
            raise RuntimeError(f"run {run_id} is {status}:\n{self.run_log(run_id)}")

    @contextmanager
    def _watched(self, run_id: str) -> Iterator[Watch | None]:
        """Follow the log of a run, if anybody wants to hear of it."""
        name = f"run-{run_id}"
        if not LOG.isEnabledFor(INFO):
            yield None
            return
        self._processes.start(name, "flwr", "log", run_id, NAME, "--stream")
        try:
            yield Watch(self._processes.log_path(name))
        finally:
            self._processes.kill(name)
