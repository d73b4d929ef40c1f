"""The dispatcher: hands the tasks of a SuperNode to the workers of their runs.

See `flwr_safedshb.node.worker_pool` for who does what, and what is guaranteed.
"""

from __future__ import annotations

import select
import socket
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import TYPE_CHECKING

from flwr_safedshb.node.log_tail import LogTail
from flwr_safedshb.node.node_status import NodeStatus
from flwr_safedshb.node.owner_rules import OwnerRules
from flwr_safedshb.node.stop_request import StopRequest
from flwr_safedshb.node.worker_pool import ForkServer, receive_packet, send_packet

if TYPE_CHECKING:
    from flwr_safedshb.node.flower_patches.runtime_client import ClaimedTask, Runtime

# Runs that are served at a time.
_MAX_WORKERS = 8
# Nobody tells a node that a run has ended. So a worker ends when it was idle for so
# many times as long as ever before, within bounds, in seconds. If the run goes on after
# all, its next message loads the app again.
_IDLE_FACTOR, _MIN_IDLE_SECONDS, _MAX_IDLE_SECONDS = 3.0, 60.0, 900.0


@dataclass(eq=False)
class _WorkerHandle:
    """The dispatcher's side of a worker.

    Attributes
    ----------
    task : ClaimedTask, optional
        What it works on.
    head : bytes
        What it has seen of that task's message; see `fail_task`.
    active_at : float
        When it last began or ended something.
    longest_idle : float
        Seconds; the longest that it had nothing to do between two tasks.
    """

    link: socket.socket
    active_at: float
    longest_idle: float = 0.0
    waiting: list[ClaimedTask] = field(default_factory=list)
    task: ClaimedTask | None = None
    head: bytes = b""
    description: str = "a message"

    def is_done(self, now: float) -> bool:
        """Return True if the worker's run seems to have ended."""
        limit = min(
            max(_IDLE_FACTOR * self.longest_idle, _MIN_IDLE_SECONDS), _MAX_IDLE_SECONDS
        )
        return self.task is None and now - self.active_at > limit


class Dispatcher:
    """Hand the tasks of a SuperNode to the workers of their runs.

    Parameters
    ----------
    fork_server : ForkServer
    runtime : Runtime
    rules : OwnerRules
        What the owner permits, asked for each task.
    status : NodeStatus
        Is told what was answered.
    """

    def __init__(
        self,
        fork_server: ForkServer,
        runtime: Runtime,
        rules: OwnerRules,
        status: NodeStatus,
    ) -> None:
        self._fork_server, self._runtime, self._rules = fork_server, runtime, rules
        self._status = status
        self._workers: OrderedDict[int, _WorkerHandle] = OrderedDict()

    def assign(self, task: ClaimedTask) -> None:
        """Give a task to the worker of its run, a new one if need be."""
        worker = self._workers.get(task.run_id)
        if worker is None:
            worker = _WorkerHandle(self._fork_server.fork_worker(), time.monotonic())
            self._workers[task.run_id] = worker
        self._workers.move_to_end(task.run_id)
        worker.waiting.append(task)
        self._start_next(worker)

    def poll(self, seconds: float, *others: LogTail | StopRequest) -> None:
        """Wait until a worker or another source says something; end idle workers."""
        links = {worker.link: run for run, worker in self._workers.items()}
        sources: list[socket.socket | LogTail | StopRequest] = [*links, *others]
        for source in select.select(sources, [], [], seconds)[0]:
            if isinstance(source, LogTail):
                source.read()
            elif isinstance(source, socket.socket):
                self._on_packet(links[source])
        now = time.monotonic()
        idle = [run for run, worker in self._workers.items() if worker.task is None]
        ended = [run for run in idle if self._workers[run].is_done(now)]
        ended += idle[: max(len(self._workers) - _MAX_WORKERS, 0)]
        for run in {*ended}:
            self._workers.pop(run).link.close()
        self._status.num_workers = len(self._workers)

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers.values():
            worker.link.close()
        self._workers.clear()

    def _start_next(self, worker: _WorkerHandle) -> None:
        if worker.task is not None or not worker.waiting:
            return
        worker.task, worker.head = worker.waiting.pop(0), b""
        now, permission = time.monotonic(), self._rules.read()
        worker.longest_idle = max(worker.longest_idle, now - worker.active_at)
        packet: dict[str, object] = {
            "address": self._runtime.address,
            "token": worker.task.token,
            "config": permission.config,
            "refusal": permission.refusal,
        }
        with suppress(OSError):  # it has died, which `_on_packet` will find
            send_packet(worker.link, packet)

    def _on_packet(self, run: int) -> None:
        from flwr.common import log

        worker = self._workers[run]
        worker.active_at = time.monotonic()
        try:
            packet = receive_packet(worker.link)
        except OSError:
            packet = None
        if packet is None:
            log(WARNING, "The worker of run %d has died", run)
            worker.link.close()
            del self._workers[run]
            self._fail_task(worker)
            for task in worker.waiting:
                self.assign(task)
        elif "head" in packet:
            worker.head = bytes.fromhex(str(packet["head"]))
            worker.description = str(packet["about"])
        else:
            self._status.note_answer(f"{worker.description} of run {run}")
            log(INFO, "Answered: %s", self._status.last_answered)
            worker.task = None
            self._start_next(worker)

    def _fail_task(self, worker: _WorkerHandle) -> None:
        """Answer with an error for a worker that has died over its task."""
        from flwr.common import log

        from flwr_safedshb.node.flower_patches.runtime_client import fail_task

        if worker.task is None:
            return
        try:
            reason = "the process of the ClientApp has died"
            fail_task(self._runtime, worker.task.token, worker.head, reason)
        except Exception as error:
            log(WARNING, "No error could be sent for it: %s", type(error).__name__)
