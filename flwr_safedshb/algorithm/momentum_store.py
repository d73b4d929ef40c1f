"""The momentum that a client keeps between steps, and how far back it can go.

A server that was killed resumes from its newest checkpoint, some steps back, and a
message may be delivered twice. So a client keeps two momentums: the newest, and the one
before the step that the server could resume from (its anchor). Both have been sent or
are zero, so what is loaded for which step is no matter of privacy.

A simulation keeps them in Flower's context. With a ledger they are files beside it,
each there whole or not at all: a step writes one file, under a name of its run and its
step; then what is no longer needed is removed. So a kill at any moment leaves the
momentum of this step or of the one before. Whatever else a file holds (a disk that
failed, somebody's edit, a momentum of another run) is noticed and counts as lost: that
costs accuracy and never privacy. A file is a line of JSON, and the numbers as
little-endian float32.
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
from typing import TYPE_CHECKING, cast

import numpy as np
from flwr.app import ConfigRecord, ConfigRecordValues, Context
from flwr.common import log
from numpy.typing import NDArray

from flwr_safedshb.flower.compat import replace_entries_unchecked
from flwr_safedshb.privacy.ledger.ledger import Ledger, LedgerError

if TYPE_CHECKING:
    from flwr_safedshb.algorithm.step import Step

Vector = NDArray[np.float32]

_FORMAT = "safedshb momentum 1"
_TEMPORARY = ".momentum"
_MAX_HEAD = 4096
_ALIGNED = 64
# Runs whose momentums are kept: the running one, and a few that may still come back.
_RUNS_KEPT = 4
_KEY = "safedshb"
_ZERO = np.zeros(1, np.float32)


@dataclass(frozen=True)
class Kept:
    """The momentum after a step, (d,), and the step that its run may go back to.

    Before step 0 it is zero: step -1.
    """

    step: int
    momentum: Vector
    anchor: int = -1


def recall(
    session: str, step: int, size: int, context: Context, ledger: Ledger | None
) -> Kept:
    """Return what `step` of a run starts from, (d,) or zero, (1,), for a new run.

    Raises
    ------
    LedgerError
        If the disk has no room to keep what comes of it.
    """
    if ledger is None:
        kept = _in_context(session, context)
        usable = [one for one in kept if one.step < step]
        found = usable[0] if usable else None
    else:
        files = MomentumFiles(ledger.path.parent)
        if not files.room_for(size):
            raise LedgerError(
                f"the disk of {ledger.path} has no room for the momentum; nothing was "
                "charged, free some space"
            )
        found = files.newest(session, step, size)
    return Kept(-1, _ZERO) if found is None else found


def keep(
    step: Step, momentum: Vector, past: Kept, context: Context, ledger: Ledger | None
) -> None:
    """Keep m_t, and the anchor; with the ledger both outlive the node's process."""
    kept = Kept(step.number, momentum, past.step if step.anchor else past.anchor)
    if ledger is not None:
        MomentumFiles(ledger.path.parent).write(step.session, kept)
        return
    before = [past, *_in_context(step.session, context), Kept(-1, _ZERO)]
    anchor = next(one for one in before if one.step in (kept.anchor, -1))
    values: dict[str, ConfigRecordValues] = {
        "session": step.session,
        "steps": [kept.step, anchor.step],
        "newest": momentum.tobytes(),
        "anchor": anchor.momentum.tobytes(),
    }
    record = context.state.get(_KEY)
    context.state[_KEY] = (
        replace_entries_unchecked(record, values)
        if isinstance(record, ConfigRecord)
        else ConfigRecord(values)
    )


def _in_context(session: str, context: Context) -> list[Kept]:
    """Return the newest momentum of a run, and its anchor."""
    state = context.state.get(_KEY)
    if state is None or state["session"] != session:
        return []
    newest, anchor = cast(list[int], state["steps"])
    vectors = [
        np.frombuffer(cast(bytes, state[name]), np.float32)
        for name in ("newest", "anchor")
    ]
    return [Kept(newest, vectors[0], anchor), Kept(anchor, vectors[1], anchor)]


class MomentumFiles:
    """The momentums in a folder, of all runs.

    Parameters
    ----------
    folder : Path
        Of the node's ledger. Several processes may use it at a time.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def newest(self, run: str, before: int, size: int) -> Kept | None:
        """Return the newest momentum of a run before a step, if there is one.

        Parameters
        ----------
        run : str
        before : int
            A step.
        size : int
            d; a momentum of another size is none of this run's.
        """
        with self._locked():
            steps = self._steps(run)
            for step in sorted((one for one in steps if one < before), reverse=True):
                kept = _read(steps[step], run, size)
                if kept is None:
                    continue
                # Where the run has gone back to, it may go back to again.
                went_back = step < max(steps) or kept.anchor not in (-1, *steps)
                return replace(kept, anchor=step) if went_back else kept
        return None

    def write(self, run: str, kept: Kept) -> None:
        """Keep a momentum, and of those before it only the one at its anchor."""
        with self._locked() as folder:
            temporary = self.folder / _TEMPORARY
            _write(temporary, run, kept)
            os.replace(temporary, self.folder / f"{_prefix(run)}{kept.step}")
            os.fsync(folder)
            for step, path in self._steps(run).items():
                if step not in (kept.step, kept.anchor):
                    path.unlink()
            self._drop_old_runs(run)

    def room_for(self, size: int) -> bool:
        """Say whether the disk has room for one more momentum of d numbers."""
        disk = os.statvfs(self.folder)
        return 4 * size + _MAX_HEAD <= disk.f_bavail * disk.f_frsize

    def _steps(self, run: str) -> dict[int, Path]:
        """Return the files of a run by their steps."""
        prefix = _prefix(run)
        return {
            int(path.name.removeprefix(prefix)): path
            for path in self.folder.glob(f"{prefix}*")
            if path.name.removeprefix(prefix).isdecimal()
        }

    def _drop_old_runs(self, run: str) -> None:
        written: dict[str, int] = {}
        for path in self.folder.glob("momentum-*"):
            prefix = path.name[: len(_prefix(run))]
            if prefix != _prefix(run):  # whatever the clock says, it is the newest
                age = path.stat().st_mtime_ns
                written[prefix] = max(age, written.get(prefix, age))
        newest_first = sorted(written, key=lambda prefix: written[prefix], reverse=True)
        for prefix in newest_first[_RUNS_KEPT - 1 :]:
            for path in self.folder.glob(f"{prefix}*"):
                path.unlink()

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Be the only process that reads or writes momentums here."""
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield folder
        finally:
            os.close(folder)


def _prefix(run: str) -> str:
    return f"momentum-{hashlib.sha256(run.encode()).hexdigest()[:32]}-"


def _head(run: str, step: int, anchor: int, momentum: Vector) -> bytes:
    """Return the first line, of a length that keeps the numbers aligned."""
    about = [_FORMAT, run, step, anchor, momentum.size]
    # Against accidents: it finds any one wrong byte, in half the time of a hash.
    check = zlib.crc32(momentum.data, zlib.crc32(json.dumps(about).encode()))
    line = json.dumps([*about, check]).encode()
    return line + b" " * (-(len(line) + 1) % _ALIGNED) + b"\n"


def _write(path: Path, run: str, kept: Kept) -> None:
    path.unlink(missing_ok=True)  # what a process left that was killed
    momentum = np.ascontiguousarray(kept.momentum, "<f4")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(_head(run, kept.step, kept.anchor, momentum))
        file.write(momentum.data)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path, run: str, size: int) -> Kept | None:
    """Return what a file holds, or None and a word in the log if it is not whole."""
    try:
        with path.open("rb") as file:
            head = file.readline(_MAX_HEAD)
            _, _, step, anchor, *_ = json.loads(head)
            # Read where it is used, so that no second copy is in memory.
            momentum = np.memmap(file, "<f4", "r", len(head))
        if head == _head(run, step, anchor, momentum) and momentum.size == size:
            return Kept(step, momentum, anchor)
        problem = "it is damaged, or of another model or run"
    except (OSError, ValueError, TypeError) as error:
        problem = str(error)
    log(WARNING, "The momentum %s counts as lost: %s", path, problem)
    return None
