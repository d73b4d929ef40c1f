"""Momentums on disk: whole or not there, whatever stops or disturbs the process."""

import json
import logging
import multiprocessing
import os
import random
import signal
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from flwr.app import RecordDict

from flwr_safedshb.algorithm.budget import LEDGER_NAME
from flwr_safedshb.algorithm.momentum_store import (
    ContextMomentums,
    MomentumFiles,
    MomentumState,
    Vector,
)
from flwr_safedshb.algorithm.refusal import RefusedError
from tests.clients import ask, ledger, node, same

SIZE = 50


class Killed(BaseException):
    """Nothing after this happens in the process."""


def momentum(step: int) -> Vector:
    return np.random.default_rng(step).standard_normal(SIZE, dtype=np.float32)


def found(files: MomentumFiles, run: str = "run", before: int = 10**9) -> int:
    """Return the step that is found, after comparing its momentum; -1 for none."""
    state = files.load(run, before, SIZE)
    if state.step == -1:
        assert not state.momentum.any()
    else:
        np.testing.assert_array_equal(state.momentum, momentum(state.step))
    return state.step


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_newest_and_anchor_are_kept_and_nothing_else(tmp_path: Path) -> None:
    files = MomentumFiles(tmp_path)
    for step in range(7):
        files.save(
            "run", MomentumState(step, momentum(step), 3 if step > 3 else step - 1)
        )
    assert found(files) == 6
    assert found(files, before=6) == 3
    assert found(files, before=3) == -1
    assert found(files, "another") == -1
    assert len(names(tmp_path)) == 2
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) < 2 * (4 * SIZE + 300)


def test_only_the_owner_can_read_them(tmp_path: Path) -> None:
    MomentumFiles(tmp_path).save("run", MomentumState(0, momentum(0)))
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def kill_at(monkeypatch: pytest.MonkeyPatch, call: int) -> Callable[[], int]:
    """Let the process end before the given one of its calls that change the disk."""
    count = 0

    def counted(name: str) -> None:
        real = getattr(os, name)

        def instead(*arguments: object, **more: object) -> object:
            nonlocal count
            count += 1
            if count > call:
                raise Killed
            return real(*arguments, **more)

        monkeypatch.setattr(os, name, instead)

    for name in ("open", "fdopen", "fsync", "replace", "unlink"):
        counted(name)
    return lambda: count


def test_a_kill_at_any_point_leaves_this_step_or_the_one_before(tmp_path: Path) -> None:
    kept_new = 0
    for call in range(100):
        folder = tmp_path / str(call)
        folder.mkdir()
        files = MomentumFiles(folder)
        for step in range(4):
            files.save("run", MomentumState(step, momentum(step), step - 1))
        with pytest.MonkeyPatch.context() as patched:
            calls = kill_at(patched, call)
            with suppress(Killed):
                files.save("run", MomentumState(4, momentum(4), 3))
            over = calls() <= call
        step = found(files)
        assert step in (3, 4)
        assert found(files, before=4) == 3
        kept_new += step == 4
        # The next step finds its way, and clears up what was left.
        files.save("run", MomentumState(5, momentum(5), step))
        assert found(files) == 5
        assert len(names(folder)) == 2
        if over:
            break
    assert call >= 5
    assert 1 <= kept_new < call


@pytest.mark.parametrize("size", [0, 1, 20, 150, 4 * SIZE])
def test_a_file_cut_short_counts_as_lost(
    tmp_path: Path, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    files = MomentumFiles(tmp_path)
    for step in range(2):
        files.save("run", MomentumState(step, momentum(step), step - 1))
    with next(tmp_path.glob("*-1")).open("r+b") as file:
        file.truncate(size)
    with caplog.at_level(logging.WARNING):
        assert found(files) == 0
    assert "counts as lost" in caplog.text
    files.save("run", MomentumState(2, momentum(2), 0))
    assert found(files) == 2


def test_no_changed_byte_is_taken_for_a_momentum(tmp_path: Path) -> None:
    files, rng = MomentumFiles(tmp_path), random.Random(0)
    files.save("run", MomentumState(0, momentum(0)))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= rng.randrange(1, 256)
        path.write_bytes(damaged)
        assert found(files) == -1
    path.write_bytes(whole)
    assert found(files) == 0


def test_a_momentum_of_another_run_step_or_model_counts_as_lost(tmp_path: Path) -> None:
    files = MomentumFiles(tmp_path)
    files.save("run", MomentumState(3, momentum(3)))
    assert files.load("run", 9, SIZE + 1).step == -1
    files.save("another", MomentumState(4, momentum(4)))
    mine, theirs = (
        next(tmp_path.glob(pattern)) for pattern in ("momentum-*-3", "momentum-*-4")
    )
    mine.write_bytes(theirs.read_bytes())
    assert found(files) == -1
    mine.unlink()
    mine.mkdir()  # whatever is there
    assert found(files) == -1


def test_old_runs_are_dropped_and_never_the_running_one(tmp_path: Path) -> None:
    files = MomentumFiles(tmp_path)
    for number in range(8):
        files.save(f"run-{number}", MomentumState(0, momentum(0)))
        for path in tmp_path.iterdir():  # a clock that is set back again and again
            os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**12))
        assert found(files, f"run-{number}") == 0
    assert len(names(tmp_path)) == 4


def test_going_back_twice_finds_the_anchor_twice(tmp_path: Path) -> None:
    context = node(tmp_path)
    straight = node()
    expected = [ask(straight, t) for t in range(6)]
    anchored = [t == 3 for t in range(6)]
    for t in range(6):
        ask(context, t, anchor=anchored[t])
    for _ in range(2):
        # Also if this time the server does not say that it may come back.
        assert same(ask(context, 3, anchor=False), expected[3])
        assert same(ask(context, 4, anchor=False), expected[4])


def test_a_momentum_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut a name without its bytes, or none, would lose the momentum."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(handle: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file"
        done.append(f"fsync {kind}")
        if kind == "file":  # with all that was written
            assert os.fstat(handle).st_size > 4 * SIZE
        fsync(handle)

    def watched_replace(source: Path, target: Path) -> None:
        done.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    MomentumFiles(tmp_path).save("run", MomentumState(0, momentum(0)))
    assert done == ["fsync file", "rename", "fsync folder"]


def test_nothing_is_kept_twice(tmp_path: Path) -> None:
    context = node(tmp_path)
    for t in range(3):
        ask(context, t)
    assert not context.state
    kept = [name for name in names(tmp_path / "state") if name != LEDGER_NAME]
    assert sorted(int(name.rpartition("-")[2]) for name in kept) == [1, 2]


def test_a_full_disk_costs_no_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    context = node(tmp_path)
    ask(context, 0)
    monkeypatch.setattr(MomentumFiles, "_has_room", lambda files, size: size > 4)
    # The server hears what it hears of any ledger that cannot be used.
    with pytest.raises(RefusedError, match=r"^the privacy ledger of this node cannot"):
        ask(context, 1)
    assert "no room for the momentum" in caplog.text
    assert len(ledger(tmp_path).charges()) == 1


def test_room_is_what_the_disk_has(tmp_path: Path) -> None:
    files, free = MomentumFiles(tmp_path), os.statvfs(tmp_path)
    most = free.f_bavail * free.f_frsize // 4
    assert files._has_room(most // 2)
    assert not files._has_room(2 * most)


def write_until_killed(folder: Path, told: Connection) -> None:
    files = MomentumFiles(folder)
    step = found(files)
    while True:
        step += 1
        files.save("run", MomentumState(step, momentum(step), step - 1))
        told.send(step)


@pytest.mark.process
def test_a_killed_process_leaves_whole_momentums(tmp_path: Path) -> None:
    fresh = multiprocessing.get_context("fork")
    rng, newest = random.Random(0), -1
    for _ in range(10):
        mine, theirs = fresh.Pipe(duplex=False)
        process = fresh.Process(target=write_until_killed, args=(tmp_path, theirs))
        process.start()
        theirs.close()
        newest = mine.recv()
        time.sleep(rng.uniform(0.0, 0.01))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        with suppress(EOFError):
            while True:
                newest = mine.recv()
        assert found(MomentumFiles(tmp_path)) in (newest, newest + 1)
    # Newest, anchor, and what the last kill may have left half way.
    assert len(names(tmp_path)) <= 4


def test_a_file_says_what_it_is(tmp_path: Path) -> None:
    MomentumFiles(tmp_path).save("run", MomentumState(5, momentum(5), 4))
    (path,) = tmp_path.iterdir()
    head, _, numbers = path.read_bytes().partition(b"\n")
    assert json.loads(head)[:5] == ["safedshb momentum 1", "run", 5, 4, SIZE]
    np.testing.assert_array_equal(np.frombuffer(numbers, "<f4"), momentum(5))


def test_a_context_has_the_momentum_of_one_run_only() -> None:
    store = ContextMomentums(RecordDict())
    store.save("run", MomentumState(0, momentum(0)))
    assert store.load("run", 1, SIZE).step == 0
    other = store.load("other", 1, SIZE)
    assert other.step == -1
    assert not other.momentum.any()
