"""Store the momentum that a client keeps between steps.

A server that was killed resumes from its newest checkpoint, some steps back, and a
message may be delivered twice. So a store keeps two momentums of a run: the newest, and
the anchor, the one before the last step that the server checkpointed. Both have been
sent or are zero, so either may start a step without a cost in privacy.

`ContextMomentums` keeps them in Flower's context, for simulations. `MomentumFiles`
keeps them beside the ledger, in files that are replaced atomically. A step writes one
file, named after its run and step, and removes those that are no longer needed. A kill
at any moment leaves the momentum of this step or of the one before. A damaged file, or
one of another run, is ignored: that costs accuracy and never privacy. A file is a line
of JSON, then the numbers as little-endian float32.

A file also names the request that its momentum answers. The same request again, as
after a restart of the server, gets the same momentum: nothing is computed or charged.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from logging import WARNING
from pathlib import Path
from typing import ClassVar, cast

import numpy as np
from flwr.app import ConfigRecord, ConfigRecordValues, RecordDict
from flwr.common import log
from numpy.typing import NDArray

from flwr_safedshb.flower.compat import replace_entries_unchecked
from flwr_safedshb.privacy.ledger.ledger import LedgerError

Vector = NDArray[np.float32]

_FORMAT = "safedshb momentum 1"
_TEMPORARY = ".momentum"
_MAX_HEAD = 4096
_ALIGNED = 64
# Runs whose momentums are kept: the current one, and a few that may be resumed.
_RUNS_KEPT = 4
_KEY = "safedshb"


@dataclass(frozen=True)
class MomentumState:
    """The momentum after a step.

    Attributes
    ----------
    step : int
        t; -1 before the first step.
    momentum : ndarray of shape (d,), or (1,) for zero
    anchor : int
        The step that the run may be resumed after.
    request : str
        The hash of the request that the momentum answers; empty if it answers none.
    """

    step: int
    momentum: Vector
    anchor: int = -1
    request: str = ""


_ZERO = MomentumState(-1, np.zeros(1, np.float32))


class ContextMomentums:
    """Momentums in the state of Flower's context, which holds one run at a time.

    A simulated step that comes again is taken again, with the same random numbers.
    """

    keeps_answers: ClassVar[bool] = False

    def __init__(self, state: RecordDict) -> None:
        self._state = state

    def load(self, session: str, step: int, size: int) -> MomentumState:
        """Return the newest momentum of a run before a step, or zero."""
        kept = (one for one in self._read(session) if one.step < step)
        return next(kept, _ZERO)

    def find_answer(self, session: str, step: int, request: str) -> None:
        """Return None: no answer is kept."""

    def save(self, session: str, state: MomentumState) -> None:
        """Save a momentum and its anchor."""
        before = [*self._read(session), _ZERO]
        anchor = next(one for one in before if one.step in (state.anchor, -1))
        values: dict[str, ConfigRecordValues] = {
            "session": session,
            "steps": [state.step, anchor.step],
            "newest": state.momentum.tobytes(),
            "anchor": anchor.momentum.tobytes(),
        }
        record = self._state.get(_KEY)
        self._state[_KEY] = (
            replace_entries_unchecked(record, values)
            if isinstance(record, ConfigRecord)
            else ConfigRecord(values)
        )

    @property
    def steps_taken(self) -> int:
        """How many steps the latest run has taken."""
        record = self._state.get(_KEY)
        return 0 if record is None else cast(list[int], record["steps"])[0] + 1

    def _read(self, session: str) -> list[MomentumState]:
        """Return the newest momentum of a run, and its anchor."""
        record = self._state.get(_KEY)
        if record is None or record["session"] != session:
            return []
        newest, anchor = cast(list[int], record["steps"])
        vectors = [
            np.frombuffer(cast(bytes, record[name]), np.float32)
            for name in ("newest", "anchor")
        ]
        return [
            MomentumState(newest, vectors[0], anchor),
            MomentumState(anchor, vectors[1], anchor),
        ]


class MomentumFiles:
    """Momentums of all runs, in the folder of the node's ledger.

    Several processes may use the folder at a time.
    """

    keeps_answers: ClassVar[bool] = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, session: str, step: int, size: int) -> MomentumState:
        """Return the newest momentum of a run before a step, or zero.

        Raises
        ------
        LedgerError
            If the disk has no room for one more momentum.
        """
        if not self._has_room(size):
            raise LedgerError(
                f"the disk of {self.folder} has no room for the momentum; nothing was "
                "charged; free some space"
            )
        with self._locked():
            paths = self._find_files(session)
            for found in sorted((one for one in paths if one < step), reverse=True):
                state = _read_file(paths[found], session, size)
                if state is None:
                    continue
                # A server that resumed from this step may do so again.
                resumed = found < max(paths) or state.anchor not in (-1, *paths)
                return replace(state, anchor=found) if resumed else state
        return _ZERO

    def find_answer(self, session: str, step: int, request: str) -> Vector | None:
        """Return the momentum that has answered a request before, or None."""
        with self._locked():
            path = self._find_files(session).get(step)
            state = None if path is None else _read_file(path, session)
        if state is None or state.request != request:
            return None
        return np.array(state.momentum)

    def save(self, session: str, state: MomentumState) -> None:
        """Write a momentum to the disk; remove the earlier ones except its anchor."""
        with self._locked() as folder:
            temporary = self.folder / _TEMPORARY
            _write_file(temporary, session, state)
            os.replace(temporary, self.folder / f"{_file_prefix(session)}{state.step}")
            os.fsync(folder)
            for step, path in self._find_files(session).items():
                if step not in (state.step, state.anchor):
                    path.unlink()
            self._drop_old_runs(session)

    def _has_room(self, size: int) -> bool:
        disk = os.statvfs(self.folder)
        return 4 * size + _MAX_HEAD <= disk.f_bavail * disk.f_frsize

    def _find_files(self, session: str) -> dict[int, Path]:
        """Return the files of a run by step."""
        prefix = _file_prefix(session)
        return {
            int(path.name.removeprefix(prefix)): path
            for path in self.folder.glob(f"{prefix}*")
            if path.name.removeprefix(prefix).isdecimal()
        }

    def _drop_old_runs(self, session: str) -> None:
        """Remove the files of all but the latest runs, this one included."""
        own = _file_prefix(session)
        written: dict[str, int] = {}
        for path in self.folder.glob("momentum-*"):
            prefix = path.name[: len(own)]
            if prefix != own:  # the newest, whatever the clock says
                age = path.stat().st_mtime_ns
                written[prefix] = max(age, written.get(prefix, age))
        newest_first = sorted(written, key=lambda prefix: written[prefix], reverse=True)
        for prefix in newest_first[_RUNS_KEPT - 1 :]:
            for path in self.folder.glob(f"{prefix}*"):
                path.unlink()

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Lock the folder against other processes, and yield its file descriptor."""
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield folder
        finally:
            os.close(folder)


# Either of the two stores.
MomentumStore = ContextMomentums | MomentumFiles


def _file_prefix(session: str) -> str:
    return f"momentum-{hashlib.sha256(session.encode()).hexdigest()[:32]}-"


def _make_head(session: str, state: MomentumState) -> bytes:
    """Return the first line of a file, padded so that the numbers are aligned."""
    about = [_FORMAT, session, state.step, state.anchor, state.momentum.size]
    about.append(state.request)
    # Against accidents: CRC-32 finds any single wrong byte, in half the time of a hash.
    check = zlib.crc32(state.momentum.data, zlib.crc32(json.dumps(about).encode()))
    line = json.dumps([*about, check]).encode()
    return line + b" " * (-(len(line) + 1) % _ALIGNED) + b"\n"


def _write_file(path: Path, session: str, state: MomentumState) -> None:
    path.unlink(missing_ok=True)  # left by a process that was killed
    state = replace(state, momentum=np.ascontiguousarray(state.momentum, "<f4"))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(_make_head(session, state))
        file.write(state.momentum.data)
        file.flush()
        os.fsync(file.fileno())


def _read_file(
    path: Path, session: str, size: int | None = None
) -> MomentumState | None:
    """Return the momentum in a file; log a warning and return None if it is damaged."""
    try:
        with path.open("rb") as file:
            head = file.readline(_MAX_HEAD)
            _, _, step, anchor, _, request, _ = json.loads(head)
            # Mapped, so that no second copy is in memory.
            momentum = np.memmap(file, "<f4", "r", len(head))
        state = MomentumState(step, momentum, anchor, request)
        if head == _make_head(session, state) and size in (None, momentum.size):
            return state
        problem = "it is damaged, or of another model or run"
    except (OSError, ValueError, TypeError) as error:
        problem = str(error)
    log(WARNING, "The momentum %s counts as lost: %s", path, problem)
    return None
