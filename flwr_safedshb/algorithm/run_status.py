"""The status of a run in a small file beside its checkpoint, for operators.

`safedshb status` reads it. It is written at the beginning and the end of each round,
whole or not at all. It holds no arrays and nothing that a checkpoint does not hold, but
the round that is under way.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from logging import WARNING
from pathlib import Path
from statistics import median
from typing import Literal, cast

from flwr.common import log

from flwr_safedshb.algorithm.privacy_report import DELTAS, EPSILONS, NODES
from flwr_safedshb.algorithm.progress import Progress
from flwr_safedshb.algorithm.round import EXCLUDED_NODES
from flwr_safedshb.atomic_io import replace_file

SUFFIX = ".status"
# Rounds whose lengths say how long the others will take.
_RECENT_ROUNDS = 20

State = Literal["running", "ended", "nothing trained"]


@dataclass(frozen=True)
class NodeStatus:
    """What the server knows of a node: the last round it was asked in, and the outcome.

    Attributes
    ----------
    round : int
    outcome : str
        ``used``, ``left out`` (of the rule's subset), ``asked`` (the round is under
        way), ``silent``, or ``excluded: `` and the reason.
    epsilon, delta : float, optional
        What the node has stated that the run costs it; it may lie.
    """

    round: int
    outcome: str
    epsilon: float | None = None
    delta: float | None = None


@dataclass(frozen=True)
class RunStatus:
    """The status of a run.

    Attributes
    ----------
    session : str
    state : State
    round, num_rounds : int
        The round that is under way, or the last one; and T.
    since : float
        When that began, or the run ended, in seconds since 1970.
    skipped_rounds : list of int
    round_seconds : list of float
        The lengths of the latest rounds.
    nodes : dict of int to NodeStatus
    """

    session: str
    state: State
    round: int
    num_rounds: int
    since: float
    skipped_rounds: list[int] = field(default_factory=list)
    round_seconds: list[float] = field(default_factory=list)
    nodes: dict[int, NodeStatus] = field(default_factory=dict)

    def seconds_left(self, now: float) -> float | None:
        """Return about how many seconds are left; None if nobody can tell yet."""
        if self.state != "running":
            return 0.0
        if not self.round_seconds:
            return None
        each = median(self.round_seconds)
        under_way = max(each - (now - self.since), 0.0)
        return under_way + each * (self.num_rounds - self.round)


def find_status_file(checkpoint: Path) -> Path:
    """Return where the status of a run with this checkpoint is."""
    return checkpoint.with_suffix(SUFFIX)


def read_status(path: Path) -> RunStatus:
    """Read a status.

    Raises
    ------
    FileNotFoundError, ValueError
    """
    try:
        content = json.loads(path.read_text())
        nodes = {int(n): NodeStatus(**about) for n, about in content["nodes"].items()}
        return RunStatus(**{**content, "nodes": nodes})
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is no status of a run: {error}") from error


class StatusWriter:
    """Write the status of a run as it goes on.

    Parameters
    ----------
    checkpoint : Path
    """

    def __init__(self, checkpoint: Path) -> None:
        self._path = find_status_file(checkpoint)
        self._status: RunStatus | None = None

    def begin_round(self, progress: Progress, asked: Sequence[int]) -> None:
        """Write that a round begins, and whom it asks."""
        number = progress.step + 1
        before = self._status.nodes if self._status is not None else {}
        if self._status is None and progress.step in progress.train:  # resumed
            before = _find_outcomes(progress, before)
        stated = {n: (s.epsilon, s.delta) for n, s in before.items()}
        nodes = {
            n: NodeStatus(number, "asked", *stated.get(n, (None, None))) for n in asked
        }
        self._write(progress, "running", number, {**before, **nodes})

    def end_round(self, progress: Progress) -> None:
        """Write what came of the round that is under way."""
        if self._status is None:
            return
        seconds = [*self._status.round_seconds, time.time() - self._status.since]
        nodes = _find_outcomes(progress, self._status.nodes)
        recent = seconds[-_RECENT_ROUNDS:]
        self._write(progress, "running", progress.step, nodes, recent)

    def end_run(self, progress: Progress) -> None:
        """Write that the run has ended."""
        nodes = {} if self._status is None else self._status.nodes
        is_trained = len(progress.skipped_rounds) < len(progress.train)
        state: State = "ended" if is_trained else "nothing trained"
        self._write(progress, state, progress.step, nodes)

    def _write(
        self,
        progress: Progress,
        state: State,
        number: int,
        nodes: dict[int, NodeStatus],
        seconds: list[float] | None = None,
    ) -> None:
        if seconds is None:
            seconds = [] if self._status is None else self._status.round_seconds
        self._status = RunStatus(
            progress.session,
            state,
            number,
            progress.num_rounds,
            time.time(),
            progress.skipped_rounds,
            seconds,
            nodes,
        )
        content = json.dumps(asdict(self._status)).encode()
        try:
            replace_file(self._path, lambda file: file.write(content))
        except OSError as error:  # no reason to end a run
            log(WARNING, "The status cannot be written: %s", error)


def _find_outcomes(
    progress: Progress, before: Mapping[int, NodeStatus]
) -> dict[int, NodeStatus]:
    """Return what came of the newest round, beside what is known of other nodes."""
    number = progress.step
    metrics = progress.train[number]
    outcomes = {node: "used" for node, s in before.items() if s.round == number}
    for node in cast(Sequence[int], metrics.get("left-out", ())):
        outcomes[node] = "left out"
    for key, value in metrics.items():
        if key.startswith(EXCLUDED_NODES):
            reason = key.removeprefix(EXCLUDED_NODES)
            word = "silent" if reason == "missing" else f"excluded: {reason}"
            outcomes |= dict.fromkeys(cast(list[int], value), word)
    columns = (cast(list[float], metrics.get(key, [])) for key in (EPSILONS, DELTAS))
    stated = dict(
        zip(
            cast(list[int], metrics.get(NODES, [])),
            zip(*columns, strict=True),
            strict=True,
        )
    )
    nodes = dict(before)
    for node, outcome in outcomes.items():
        known = before.get(node)
        pair = stated.get(node, (known and known.epsilon, known and known.delta))
        nodes[node] = NodeStatus(number, outcome, *pair)
    return nodes
